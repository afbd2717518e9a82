#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/IR/Builders.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Pass/Pass.h"
#include "triton/Target/LLVMIR/Passes.h"

//===----------------------------------------------------------------------===//
// This file implements a pass that loads the kernel parameters marked
// `tt.indirect` through memory. It runs before LLVM's optimizations, so that a
// pointer that is used late can also be loaded late.
//===----------------------------------------------------------------------===//

namespace mlir {

#define GEN_PASS_DEF_LLVMPARAMINDIRECTION
#include "triton/Target/LLVMIR/Passes.h.inc"

namespace {

constexpr llvm::StringLiteral kIndirect = "tt.indirect";
constexpr unsigned kGlobal = 1;

LogicalResult loadParam(LLVM::LLVMFuncOp func, unsigned index,
                        OpBuilder &builder) {
  BlockArgument param = func.getArgument(index);
  auto type = dyn_cast<LLVM::LLVMPointerType>(param.getType());
  bool isGlobal = type && type.getAddressSpace() == kGlobal;
  // A parameter that is passed by value, such as a host tensor descriptor, is
  // no pointer for the caller.
  bool isByValue =
      func.getArgAttr(index, LLVM::LLVMDialect::getByValAttrName()) != nullptr;
  if (!isGlobal || isByValue)
    return func.emitError("parameter ")
           << index << " cannot be indirect, it is no pointer to global memory";

  // How the parameter is passed stays; what is known of the pointer is not true
  // of the slot.
  SmallVector<NamedAttribute> kept;
  for (NamedAttribute attr : func.getArgAttrDict(index))
    if (attr.getName() == LLVM::LLVMDialect::getInRegAttrName() ||
        attr.getName() == LLVM::LLVMDialect::getNoUndefAttrName())
      kept.push_back(attr);
  func.setArgAttrs(index, kept);

  auto pointer = LLVM::LoadOp::create(builder, param.getLoc(), type, param,
                                      /*alignment=*/8, /*isVolatile=*/false,
                                      /*isNonTemporal=*/false,
                                      /*isInvariant=*/true);
  param.replaceAllUsesExcept(pointer, pointer);
  return success();
}

LogicalResult loadParams(LLVM::LLVMFuncOp func) {
  OpBuilder builder(func.getContext());
  if (!func.isExternal())
    builder.setInsertionPointToStart(&func.getBody().front());
  for (unsigned index = 0; index < func.getNumArguments(); ++index) {
    if (!func.getArgAttr(index, kIndirect))
      continue;
    if (func.isExternal() || func.getLinkage() != LLVM::Linkage::External)
      return func.emitError("parameter ")
             << index << " cannot be indirect, the function is no kernel";
    if (failed(loadParam(func, index, builder)))
      return failure();
  }
  return success();
}

} // anonymous namespace

struct LLVMParamIndirectionPass
    : public impl::LLVMParamIndirectionBase<LLVMParamIndirectionPass> {
  void runOnOperation() override {
    for (auto func : getOperation().getOps<LLVM::LLVMFuncOp>())
      if (failed(loadParams(func)))
        return signalPassFailure();
  }
};

} // namespace mlir
