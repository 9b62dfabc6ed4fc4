#!/usr/bin/env python3
"""What gpureap's daemon costs real CUDA work, and how long a reap takes, side by side in one run.

    cost.py GPUREAP SCENARIOS OUT [PART...]

GPUREAP    the binary, a release build
SCENARIOS  as for measure.py
OUT        a directory for cost.json
PART       reaps, starts, small, large, load; all of them, in this order, take about 12 minutes

Needs root, PyTorch and one GPU. With and without the daemon take turns, so that a change of the machine meets both. A
ratio's interval is of 2,000 bootstrap samples over the turns, 2.5 to 97.5 %. Exit 0 if every reap freed its GPU; times judge nothing.
"""
import json, os, platform, random, signal, statistics, subprocess, sys, tempfile, time

GPUREAP, SCENARIOS, OUT = sys.argv[1:4]
PARTS = sys.argv[4:] or ["reaps", "starts", "small", "large", "load"]
DIR = tempfile.mkdtemp(prefix="gpureap-")
ENV = dict(os.environ, GPUREAP_PIN_DIR="/sys/fs/bpf/gpureap-cost", GPUREAP_RUN_DIR=f"{DIR}/run", GPUREAP_STATE_DIR=f"{DIR}/state", GPUREAP_CONFIG=f"{DIR}/config.toml")
open(f"{DIR}/config.toml", "w").write("")
TURNS, TURN_S = 24, 2.0

# Prints a line for each step: when it ended, and how long it took. `small` waits for launches, `large` for arithmetic;
# `load` has four workers that feed it, which are forked anew for each pass.
TRAIN = r"""
import sys, time, torch
kind = sys.argv[1]
torch.manual_seed(0)
width, depth, batch = dict(small=(256, 24, 32), large=(8192, 4, 4096), load=(256, 8, 64))[kind]
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
class Set(torch.utils.data.Dataset):
    def __len__(self): return 64 * 200
    def __getitem__(self, i): return torch.full((width,), float(i % 7))
def batches():
    if kind != 'load':
        x = torch.randn(batch, width, device='cuda', dtype=torch.bfloat16)
        while True: yield x
    while True:
        for x in torch.utils.data.DataLoader(Set(), batch_size=batch, num_workers=4):
            yield x.cuda().bfloat16()
def step(x):
    optimizer.zero_grad(); model(x).float().pow(2).mean().backward(); optimizer.step(); torch.cuda.synchronize()
source = batches()
for _ in range(20): step(next(source))
print('ready', flush=True)
while True:
    begun = time.monotonic(); step(next(source)); ended = time.monotonic()
    print(ended, ended - begun, flush=True)
"""
INIT = "import ctypes\ncu = ctypes.CDLL('libcuda.so.1')\nc = ctypes.c_void_p()\nassert not cu.cuInit(0) and not cu.cuCtxCreate_v2(ctypes.byref(c), 0, 0)\n"
TORCH = "import torch\ntorch.zeros(1, device='cuda')\ntorch.cuda.synchronize()\n"


def spread(pairs):
    """The median of the ratios of each pair, with its interval."""
    ratios = [with_it / without for without, with_it in pairs]
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return dict(ratio=statistics.median(ratios), low=medians[50], high=medians[1949], pairs=len(pairs), without_ms=statistics.median(p[0] for p in pairs) * 1e3, with_ms=statistics.median(p[1] for p in pairs) * 1e3)


class Daemon:
    def __enter__(self):
        self.process = subprocess.Popen([GPUREAP, "daemon"], env=ENV, stderr=open(f"{OUT}/daemon.log", "a"), start_new_session=True)
        self.begun = time.monotonic()
        while not os.path.exists(f"{DIR}/run/gpureap.sock") or self.status() != "map":
            if self.process.poll() is not None or time.monotonic() > self.begun + 30:
                self.process.kill()
                raise SystemExit("the daemon did not start: see daemon.log")
            time.sleep(0.02)
        return self

    @staticmethod
    def status():
        return json.loads(subprocess.run([GPUREAP, "holders", "--json"], env=ENV, capture_output=True, text=True).stdout)["source"]

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)

    def cpu(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self):
        return {line.split(":")[0]: int(line.split()[1]) for line in open(f"/proc/{self.process.pid}/status") if line.startswith(("VmRSS", "VmHWM"))}


def steps(kind):
    """Step times of a job that goes on while the daemon comes and goes."""
    log = open(f"{DIR}/{kind}", "w+")
    job = subprocess.Popen([sys.executable, "-c", TRAIN, kind], stdout=log, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while "ready" not in open(f"{DIR}/{kind}").readline():
            if job.poll() is not None:
                raise SystemExit(f"{kind}: the job did not start")
            time.sleep(0.2)
        turns, cpu = [], []
        for turn in range(TURNS):
            # Which comes first changes, so that a drift does not favour one of them.
            for with_it in (turn % 2 == 0, turn % 2 == 1):
                if with_it:
                    with Daemon() as daemon:
                        time.sleep(0.3)
                        before, begun = daemon.cpu(), time.monotonic()
                        time.sleep(TURN_S)
                        turns.append((True, begun, time.monotonic()))
                        cpu.append((daemon.cpu() - before) / TURN_S)
                else:
                    time.sleep(0.3)
                    begun = time.monotonic()
                    time.sleep(TURN_S)
                    turns.append((False, begun, time.monotonic()))
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    times = [tuple(map(float, line.split())) for line in open(f"{DIR}/{kind}").read().split("\n")[1:-1] if line.count(" ") == 1]

    def mean(begun, ended):
        inside = [took for at, took in times if begun <= at - took and at <= ended]
        return sum(inside) / len(inside)

    means = [(with_it, mean(begun, ended)) for with_it, begun, ended in turns]
    pairs = [tuple(value for _, value in sorted(means[i:i + 2])) for i in range(0, len(means), 2)]
    return {**spread(pairs), "steps": len(times), "daemon_cpu_percent": 100 * statistics.mean(cpu)}


def starts(code, turns):
    def once():
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
        return time.monotonic() - begun

    once()
    pairs = []
    for turn in range(turns):
        pair = {}
        for with_it in (turn % 2 == 0, turn % 2 == 1):
            if with_it:
                with Daemon():
                    pair[True] = once()
            else:
                pair[False] = once()
        pairs.append((pair[False], pair[True]))
    return spread(pairs)


def scenario(name):
    process = subprocess.Popen([sys.executable, SCENARIOS, name], stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, json.loads(process.stdout.readline())


def end(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    time.sleep(0.5)


def used():
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return int(done.stdout.split()[0])


def reaps(name, rounds):
    rows = []
    for _ in range(rounds):
        process, _ = scenario(name)
        begun = time.monotonic()
        done = subprocess.run([GPUREAP, "reap", "--now", "--yes", "--json"], env=ENV, capture_output=True, text=True, timeout=120)
        whole = (time.monotonic() - begun) * 1e3
        report = json.loads(done.stdout)
        gpu = [device for device in report["devices"] if device["kind"] == "gpu"][0]
        rows.append(dict(outcome=report["outcome"], whole=whole, closed=gpu["closed_ms"], memory=gpu["memory_free_ms"], left=used()))
        end(process)
    return rows


def usual(name, rounds):
    rows = []
    for _ in range(rounds):
        process, _ = scenario(name)
        begun = time.monotonic()
        done = subprocess.run('fuser -k /dev/nvidia* >/dev/null 2>&1; sleep 2; nvidia-smi | grep -c "No running processes"', shell=True, capture_output=True, text=True)
        rows.append(dict(said=done.stdout.strip(), whole=(time.monotonic() - begun) * 1e3, left=used()))
        end(process)
    return rows


def main():
    os.makedirs(OUT, exist_ok=True)
    subprocess.run(["nvidia-smi"], stdout=subprocess.DEVNULL, check=True)
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout
    result = dict(date=time.strftime("%Y-%m-%d"), gpu=query.strip(), kernel=platform.release().split("-")[0], cores=os.cpu_count(), steps={}, starts={}, reaps={}, usual={})

    def keep():
        json.dump(result, open(f"{OUT}/cost.json", "w"), indent=1)

    if "reaps" in PARTS:
        with Daemon() as daemon:
            result["backend"] = json.loads(subprocess.run([GPUREAP, "holders", "--json"], env=ENV, capture_output=True, text=True).stdout)["backend"]
            before = daemon.cpu()
            time.sleep(20)
            result["idle"] = dict(cpu_seconds_in_20=daemon.cpu() - before, **daemon.memory())
            keep()
            for name, rounds in (("context:0", 5), ("big", 2), ("pinned", 2), ("ghost", 3), ("zombie-leader", 3), ("tree", 1)):
                result["reaps"][name] = reaps(name, rounds)
                print(name, result["reaps"][name], flush=True)
                keep()
            for name, rounds in (("context:0", 3), ("zombie-leader", 1)):
                result["usual"][name] = usual(name, rounds)
                keep()
            result["after"] = daemon.memory()
    if "starts" in PARTS:
        for name, code, turns in (("cuInit and a context", INIT, 16), ("import torch and a tensor", TORCH, 8)):
            result["starts"][name] = starts(code, turns)
            print(name, result["starts"][name], flush=True)
            keep()
    for kind in ("small", "large", "load"):
        if kind in PARTS:
            result["steps"][kind] = steps(kind)
            print(kind, result["steps"][kind], flush=True)
            keep()
    sys.exit(any(row["outcome"] != "freed" for rows in result["reaps"].values() for row in rows))


main()
