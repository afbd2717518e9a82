#!/bin/bash
# From the repository's root: bash scripts/probes/schedules/run.sh. Prints one table; logs and rows lie in $OUT/schedules.
# PARTS: delays, memory, memcheck (all). The part memory takes at most two minutes, the others about one, on an H100
# with 16 cores.
cd "$(dirname "$0")/../../.." || exit 1
PY=${PY:-python3}
PARTS=${PARTS:-delays memory memcheck}
out=${OUT:-gpu_out}/schedules
overlay=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$overlay"' EXIT
mkdir -p "$out"
$PY scripts/overlay "$overlay" >/dev/null || exit 1
export PYTHONPATH="$overlay:torch_overlay/benchmarks/dynamo" PYTHONPYCACHEPREFIX="$overlay/bytecode"
export TORCHINDUCTOR_COMPILE_THREADS=2
probe=scripts/probes/schedules/probe.py

run() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2
  shift 2
  timeout "$seconds" "$@" >"$out/$name.jsonl" 2>"$out/$name.log" || echo "$name ended with $?" >>"$out/ended.txt"
}

rm -f "$out"/*.jsonl "$out"/*.rows "$out/ended.txt"
began=$SECONDS
if [[ $PARTS == *memcheck* ]] && command -v compute-sanitizer >/dev/null; then
  run memcheck 60 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 99 \
    --target-processes application-only $PY $probe delays policy_ensemble --small --schedules dag --launches 20 &
fi
if [[ $PARTS == *delays* ]]; then
  for name in experts_loop policy_ensemble two_towers; do run "delays_$name" 50 $PY $probe delays $name & done
  run delays_unet_step 50 $PY $probe delays unet_step --small &
fi
wait
if [[ $PARTS == *memory* ]]; then
  # In one process, with its rows as they are found: programs are timed, and imports take long.
  TORCHINDUCTOR_COMPILE_THREADS=8 timeout 120 $PY $probe memory policy_ensemble experts_loop two_towers \
    2>"$out/memory.log" | tee "$out/memory.rows"
  [ "${PIPESTATUS[0]}" = 0 ] || echo "memory ended before it was done" >>"$out/ended.txt"
fi
$PY - "$out" <<'END'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
for file in sorted(out.glob("*.jsonl")):
    for line in file.read_text().splitlines():
        if line.startswith("{"):
            print(file.stem, *(f"{key}={value}" for key, value in json.loads(line).items() if value not in ("", None)))
        elif "ERROR SUMMARY" in line or "=========" in line and "Invalid" in line:
            print(file.stem, line)
if (ended := out / "ended.txt").exists():
    print(ended.read_text(), end="")
    for line in ended.read_text().splitlines():
        log = out / f"{line.split()[0]}.log"
        print(*log.read_text().splitlines()[-6:], sep="\n")
END
echo "$((SECONDS - began)) s"
