#!/bin/bash
# Builds what is missing. `build.sh memo` also builds the part that needs torch's headers; PY names the Python with torch.
set -e
cd "$(dirname "$0")"
PY=${PY:-python3}
CUDA=${CUDA_HOME:-/usr/local/cuda}; [ -d "$CUDA/include" ] || CUDA=/usr/local/cuda-13.0
mkdir -p bin
NVCC=$(command -v nvcc || echo $CUDA/bin/nvcc)
[ bin/kernels.cubin -nt kernels.cu ] || $NVCC -cubin -arch=sm_90 -o bin/kernels.cubin kernels.cu
[ bin/setparams -nt setparams.cpp ] && [ bin/setparams -nt drv.h ] || \
  g++ -std=c++17 -O2 -static-libstdc++ -static-libgcc -I"$CUDA/include" -o bin/setparams setparams.cpp -ldl
if [ "$1" = memo ]; then
  T=$($PY -c "import torch, os; print(os.path.dirname(torch.__file__))")
  g++ -std=c++17 -O1 -fPIC -shared -D_GLIBCXX_USE_CXX11_ABI=1 -I"$CUDA/include" -I"$T/include" -I"$T/include/torch/csrc/api/include" \
    -o bin/memo.so memo.cpp -L"$T/lib" -ltorch_cpu -ltorch_cuda -lc10_cuda -lc10 -ldl
fi
