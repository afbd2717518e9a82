#!/bin/bash
# From the repository's root: bash scripts/probes/many_sizes/run.sh. Writes $OUT/sizes_probe.json and $OUT/sizes_probe.txt.
# BUDGET: seconds for all (265). ONLY: parts by prefix, e.g. ONLY=setparams,bert.
began=$SECONDS
cd "$(dirname "$0")" || exit 1
PY=${PY:-python3}
export DRIVER="$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null)"
# bin/memo.so is built by the part that uses it.
if [ ! -s bin/kernels.cubin ] || ! ldd bin/setparams >/dev/null 2>&1 || ldd bin/setparams | grep -q 'not found'; then
  rm -f bin/setparams bin/kernels.cubin
  PY=$PY timeout 60 bash build.sh || echo "BUILD FAILED: the part setparams will fail"
fi
USED=$((SECONDS - began)) exec $PY probe.py
