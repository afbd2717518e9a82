"Runs the parts, each in its own process, within BUDGET seconds. ONLY=setparams,memo,... picks some."

import atexit
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import table


START = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.environ.get("OUT") or "sizes_probe_out"
PARTS = tempfile.mkdtemp()
BUDGET = float(os.environ.get("BUDGET", "265")) - float(os.environ.get("USED", "0"))
ONLY = [p for p in os.environ.get("ONLY", "").split(",") if p]

# One after the other, since they measure time. Name: (command, seconds at most, environment).
TIMED = {
    "setparams": (["part_setparams.py"], 28, {}),
    "memo": (["part_memo.py"], 34, {}),
    "cudnn_default": (["part_cudnn.py", "default"], 36, {}),
    "cudnn_avoid": (["part_cudnn.py", "avoid"], 20, {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}),
    "cudnn_deprioritized": (["part_cudnn.py", "deprioritized"], 16, {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
}
# Together: they count. They have what time is left.
COUNTED = {
    "bert": (["part_bert.py"], 150, {}),
    "bert_transplants": (["part_bert.py", "transplants"], 120, {}),
    "decode": (["part_decode.py"], 120, {}),
    "decode_transplants": (["part_decode.py", "transplants"], 100, {}),
    "bert_compiled": (["part_bert_compiled.py"], 200, {}),
}
ends = {}
started = []


def left():
    return BUDGET - (time.monotonic() - START)


def start(name, command, seconds, environment):
    print(f"== {name}, {seconds:.0f} s", flush=True)
    env = dict(os.environ, OUT=PARTS, PART_BUDGET=str(seconds), PYTHONUNBUFFERED="1", **environment)
    log = open(os.path.join(PARTS, name + ".log"), "w")
    process = subprocess.Popen(
        [sys.executable, os.path.join(HERE, command[0]), *command[1:]],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    started.append(process)
    return name, process, time.monotonic() + seconds + 6


@atexit.register
def stop():
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait(running):
    while running:
        for item in list(running):
            name, process, end = item
            if process.poll() is None and time.monotonic() < end and left() > 1.5:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ends[name] = "killed: out of time"
            else:
                ends[name] = f"exit {process.returncode}"
            running.remove(item)
            with open(os.path.join(PARTS, name + ".log")) as f:
                print("".join(f"  [{name}] {line}" for line in f.readlines()[-25:]), end="", flush=True)
            combine()
        time.sleep(0.1)


def combine():
    data = {
        "budget": BUDGET,
        "seconds": round(time.monotonic() - START, 1),
        "ends": ends,
        "python": sys.version,
        "parts": {},
    }
    for path in glob.glob(os.path.join(PARTS, "part_*.json")):
        try:
            with open(path) as f:
                part = json.load(f)
            data["parts"][os.path.basename(path)[5:-5]] = part
            data["device"] = part.get("device") or data.get("device")
        except Exception as error:
            data.setdefault("unreadable", []).append(f"{path}: {error}")
    for name, end in ends.items():
        path = os.path.join(PARTS, name + ".log")
        if end != "exit 0" and os.path.exists(path):
            with open(path) as f:
                data.setdefault("logs", {})[name] = f.read()[-4000:]
    try:
        data["driver"] = os.environ.get("DRIVER")
        text = "\n".join(table.lines(data))
    except Exception as error:
        text = f"no table: {error!r}"
    with open(os.path.join(OUT, "sizes_probe.json"), "w") as f:
        json.dump(data, f)
    with open(os.path.join(OUT, "sizes_probe.txt"), "w") as f:
        f.write(f"{data.get('device')} {data['driver']}\n{text}\n")
    return text


def main():
    shutil.rmtree(PARTS, ignore_errors=True)
    os.makedirs(PARTS)
    os.makedirs(OUT, exist_ok=True)
    timed = {k: v for k, v in TIMED.items() if not ONLY or any(k.startswith(o) for o in ONLY)}
    counted = {k: v for k, v in COUNTED.items() if not ONLY or any(k.startswith(o) for o in ONLY)}
    # Half of the time is kept for the counting parts.
    for name, (command, seconds, environment) in timed.items():
        room = left() - 8 - (0.45 * BUDGET if counted else 0)
        if room < 8:
            ends[name] = "not started: no time"
            continue
        wait([start(name, command, min(seconds, room), environment)])
    running = []
    for name, (command, seconds, environment) in counted.items():
        room = left() - 12
        if room < 8:
            ends[name] = "not started: no time"
            continue
        running.append(start(name, command, min(seconds, room), environment))
    wait(running)
    text = combine()
    print(f"===== {time.monotonic() - START:.0f} s\n{text}", flush=True)


main()
