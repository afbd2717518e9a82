"Runs bin/setparams and keeps its rows. Imports no torch."

import glob
import json
import os
import subprocess
import sys
import time


HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.environ.get("OUT", "sizes_probe_out")
START = time.monotonic()


def libcudart():
    for folder in [os.path.join(p, "nvidia/cu13/lib") for p in sys.path if p] + [
        "/usr/local/cuda/lib64",
        "/usr/local/cuda-13.0/lib64",
    ]:
        for path in sorted(glob.glob(os.path.join(folder, "libcudart.so.13*"))):
            return path
    return None


def main():
    data = {"part": "setparams", "rows": [], "errors": [], "complete": False, "libcudart": libcudart()}

    def save():
        data["seconds"] = round(time.monotonic() - START, 2)
        with open(os.path.join(OUT, "part_setparams.json"), "w") as f:
            json.dump(data, f)

    os.makedirs(OUT, exist_ok=True)
    save()
    seconds = max(float(os.environ.get("PART_BUDGET", "30")) - 4, 2)
    command = [os.path.join(HERE, "bin/setparams"), os.path.join(HERE, "bin/kernels.cubin"), str(seconds)]
    process = subprocess.Popen(
        command + ([data["libcudart"]] if data["libcudart"] else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        try:
            row = json.loads(line)
        except ValueError:
            data["errors"].append({"step": "output", "error": line.strip()[:300]})
            continue
        (data["errors"] if row["row"] in ("error", "fatal") else data["rows"]).append(row)
        data["complete"] |= row["row"] == "end"
        save()
    code = process.wait()
    if code:
        data["errors"].append({"step": "setparams", "error": f"exit code {code}"})
    save()
    for row in data["rows"]:
        if row["row"] == "set" and row["fraction"] == 1:
            print(f"  {row['nodes']:4d} {row['variant']:36s} {row['set_us_node']:.3f} us a node", flush=True)


main()
