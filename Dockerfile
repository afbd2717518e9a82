# Compiles PyGraph's torch and triton; the wheels come out in dist/:
#
#     docker build --output dist .
#
# It takes hours: give it many cores, and name no more GPU architectures than you need.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS build

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ca-certificates git python3-dev python3-venv zlib1g-dev \
    && python3 -m venv /venv \
    && /venv/bin/pip install 'pip>=25' 'setuptools>=70.1,<82'

ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0;12.0"
ARG MAX_JOBS
WORKDIR /pygraph
COPY . .
RUN PYGRAPH_PACKAGE=triton PYGRAPH_SOURCE=/upstream/triton /venv/bin/python setup.py bdist_wheel
RUN PYGRAPH_PACKAGE=torch PYGRAPH_SOURCE=/upstream/torch USE_CUDA=1 /venv/bin/python setup.py bdist_wheel

FROM scratch
COPY --from=build /pygraph/dist /
