#!/bin/bash
# Shows on a machine with one GPU what works there, in less than nine minutes, without a network, with the torch of
# `python`. Prints a table; logs, and all figures in results.json, are in $OUT (by default a new folder).
#
# Prepare, on a machine with a network:
#   make wheel
#   pip download --only-binary :all: --python-version 3.12 --dest dist cffi pycparser rich   # what `python` lacks there
# Run, with this repository and its folder dist copied to the machine with the GPU:
#   OUT=results tests/gpu/first_minute.sh --wheels dist
# Try the script itself, without a GPU, after `make test`:
#   tests/gpu/first_minute.sh --dry-run
#
# `python` needs torch with CUDA, numpy, pytest, psutil, pyyaml, xxhash and cloudpickle; with JAX for CUDA, its step runs.
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} XLA_PYTHON_CLIENT_PREALLOCATE=false
nccl="env SIRTAKI_GPU_BACKEND=nccl" staged="env SIRTAKI_GPU_BACKEND=staged"

step 0-facts 45 python "$HERE/facts.py"
step 1-one-rank 70 $CASES "one_rank and torch_gpu"
step 2-staged 70 $CASES "staged and torch_gpu"
step 3-two-hosts 70 $CASES two_hosts
step 4-killed 55 $CASES killed
step 5-jax-one-rank 45 $nccl $(ranks 1) python "$HERE/jax_collectives.py"
step 5-jax-staged 50 $staged $(ranks 2) python "$HERE/jax_collectives.py"
step 6-capture 25 $nccl $(ranks 1) python "$HERE/capture.py"
step 7-figures 40 $nccl $(ranks 1) python "$HERE/figures.py"
step 8-torch-backend 60 $CASES "(one_rank or staged) and torch_backend"
finish
