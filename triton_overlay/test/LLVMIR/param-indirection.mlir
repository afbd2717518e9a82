// RUN: triton-opt %s -triton-llvm-param-indirection -split-input-file -verify-diagnostics | FileCheck %s

// Only what is marked is loaded, once, before anything else. Facts about the
// pointer are not facts about the slot; how the parameter is passed stays.

// CHECK-LABEL: llvm.func @kernel(
// CHECK-SAME: %[[IN:[a-z0-9]+]]: !llvm.ptr<1> {llvm.inreg, llvm.noundef},
// CHECK-SAME: %[[PLAIN:[a-z0-9]+]]: !llvm.ptr<1> {tt.divisibility = 16 : i32},
// CHECK-SAME: %[[OUT:[a-z0-9]+]]: !llvm.ptr<1>,
// CHECK-SAME: %{{[a-z0-9]+}}: i32 {tt.divisibility = 16 : i32}) attributes {nvvm.kernel
// CHECK-NEXT: %[[P0:.+]] = llvm.load %[[IN]] invariant {alignment = 8 : i64} : !llvm.ptr<1> -> !llvm.ptr<1>
// CHECK-NEXT: %[[P2:.+]] = llvm.load %[[OUT]] invariant {alignment = 8 : i64} : !llvm.ptr<1> -> !llvm.ptr<1>
// CHECK-NEXT: %[[A:.+]] = llvm.load %[[P0]] : !llvm.ptr<1> -> f32
// CHECK-NEXT: %[[B:.+]] = llvm.load %[[PLAIN]] : !llvm.ptr<1> -> f32
// CHECK: llvm.store %{{.+}}, %[[P2]] : f32, !llvm.ptr<1>
// CHECK-NEXT: llvm.store %[[A]], %[[P0]] : f32, !llvm.ptr<1>
llvm.func @kernel(%in: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.inreg, llvm.noalias, llvm.noundef, tt.divisibility = 16 : i32, tt.indirect = 1 : i32},
                  %plain: !llvm.ptr<1> {tt.divisibility = 16 : i32},
                  %out: !llvm.ptr<1> {tt.divisibility = 4 : i32, tt.indirect = 1 : i32},
                  %n: i32 {tt.divisibility = 16 : i32}) attributes {nvvm.kernel = 1 : ui1, nvvm.reqntid = array<i32: 128>} {
  %a = llvm.load %in : !llvm.ptr<1> -> f32
  %b = llvm.load %plain : !llvm.ptr<1> -> f32
  %sum = llvm.fadd %a, %b : f32
  llvm.store %sum, %out : f32, !llvm.ptr<1>
  llvm.store %a, %in : f32, !llvm.ptr<1>
  llvm.return
}

// -----

// A device function gets the pointer, not the slot.

// CHECK-LABEL: llvm.func @caller(
// CHECK-SAME: %[[SLOT:[a-z0-9]+]]: !llvm.ptr<1>)
// CHECK-NEXT: %[[P:.+]] = llvm.load %[[SLOT]] invariant
// CHECK-NEXT: llvm.call @callee(%[[P]]) : (!llvm.ptr<1>) -> ()
llvm.func @caller(%p: !llvm.ptr<1> {tt.indirect = 1 : i32}) attributes {nvvm.kernel = 1 : ui1} {
  llvm.call @callee(%p) : (!llvm.ptr<1>) -> ()
  llvm.return
}
// CHECK-LABEL: llvm.func internal @callee(
// CHECK-NEXT: llvm.return
llvm.func internal @callee(%p: !llvm.ptr<1>) attributes {noinline = true} {
  llvm.return
}

// -----

// CHECK-LABEL: llvm.func @loop(
// CHECK-NEXT: %[[P:.+]] = llvm.load %{{.+}} invariant
// CHECK-NEXT: llvm.br ^bb1(%[[P]] : !llvm.ptr<1>)
// CHECK-NOT: invariant
llvm.func @loop(%p: !llvm.ptr<1> {tt.indirect = 1 : i32}, %more: i1) attributes {nvvm.kernel = 1 : ui1} {
  llvm.br ^bb1(%p : !llvm.ptr<1>)
^bb1(%q: !llvm.ptr<1>):
  llvm.cond_br %more, ^bb1(%p : !llvm.ptr<1>), ^bb2
^bb2:
  llvm.return
}

// -----

// CHECK-LABEL: llvm.func @plain(
// CHECK-NEXT: llvm.return
llvm.func @plain(%p: !llvm.ptr<1> {tt.divisibility = 16 : i32}) attributes {nvvm.kernel = 1 : ui1} {
  llvm.return
}

// -----

// expected-error @+1 {{parameter 0 cannot be indirect, it is no pointer to global memory}}
llvm.func @scalar(%n: i32 {tt.indirect = 1 : i32}) attributes {nvvm.kernel = 1 : ui1} {
  llvm.return
}

// -----

// expected-error @+1 {{parameter 1 cannot be indirect, it is no pointer to global memory}}
llvm.func @shared(%p: !llvm.ptr<1>, %q: !llvm.ptr<3> {tt.indirect = 1 : i32}) attributes {nvvm.kernel = 1 : ui1} {
  llvm.return
}

// -----

// expected-error @+1 {{parameter 0 cannot be indirect, it is no pointer to global memory}}
llvm.func @descriptor(%d: !llvm.ptr {llvm.byval = !llvm.array<128 x i8>, nvvm.grid_constant, tt.indirect = 1 : i32}) attributes {nvvm.kernel = 1 : ui1} {
  llvm.return
}

// -----

// expected-error @+1 {{parameter 0 cannot be indirect, the function is no kernel}}
llvm.func internal @device(%p: !llvm.ptr<1> {tt.indirect = 1 : i32}) {
  llvm.return
}
