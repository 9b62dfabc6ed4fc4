#!/usr/bin/env python3
"""Lets real CUDA jobs die in real ways under a running daemon, and checks what `gpureap report` says of each.

    report.py GPUREAP SCENARIOS OUT

GPUREAP    the binary
SCENARIOS  as for measure.py; its nccl-timeout is used where there are two GPUs
OUT        a directory for report.json, report.txt, report.html, events.ndjson and checks.md

Needs root and PyTorch. Exit 0 only if every check held. Starts a daemon of its own, with its own directories.
"""
import datetime, json, os, platform, signal, subprocess, sys, tempfile, time

GPUREAP, SCENARIOS, OUT = sys.argv[1:4]
os.makedirs(OUT, exist_ok=True)
DIR = tempfile.mkdtemp(prefix="gpureap-")
ENV = dict(os.environ, GPUREAP_PIN_DIR="/sys/fs/bpf/gpureap-report", GPUREAP_RUN_DIR=f"{DIR}/run", GPUREAP_STATE_DIR=f"{DIR}/state", GPUREAP_CONFIG=f"{DIR}/config.toml")
open(f"{DIR}/config.toml", "w").write('[journal]\nmemory_period = "2s"\nheartbeat = "1s"\n')
checks = []

# Writes to an address that is mapped nowhere: Xid 31, and every later call of the process fails.
BAD = r"""
import ctypes, time, torch
x = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); print('ready', flush=True); time.sleep(4)
cu = ctypes.CDLL('libcuda.so.1')
ptx = b'''.version 7.0
.target sm_70
.address_size 64
.visible .entry k(){ .reg .u64 %a; mov.u64 %a, 0xdead00000000; st.global.u32 [%a], 1; ret; }
\0'''
m, f = ctypes.c_void_p(), ctypes.c_void_p()
cu.cuModuleLoadData(ctypes.byref(m), ptx); cu.cuModuleGetFunction(ctypes.byref(f), m, b'k')
cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, None, None, None)
torch.cuda.synchronize()
"""
HOLD = "import torch, time\nx = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda')\ntorch.cuda.synchronize()\nprint('ready', flush=True)\ntime.sleep(600)\n"
# One GPU: NCCL lets no two ranks share it, so each rank has a group of its own. Rank 0's collective is queued behind a kernel
# that does not end, which is what a peer that stalls looks like from inside; its watchdog ends it after the time limit.
ONE_GPU = """
import os, sys, time, datetime, torch, torch.distributed as d
r = int(sys.argv[1]); torch.cuda.set_device(0)
d.init_process_group('nccl', init_method=f'tcp://127.0.0.1:{29511 + r}', rank=0, world_size=1, timeout=datetime.timedelta(seconds=15))
t = torch.ones(1, device='cuda'); d.all_reduce(t); torch.cuda.synchronize(); print('ready', flush=True)
if r == 1: time.sleep(600)
torch.cuda._sleep(10 ** 12)
d.all_reduce(t); torch.cuda.synchronize()
"""
RANKS = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_PROPAGATE_ERROR="0")


def check(name, right, detail=""):
    checks.append((name, bool(right), str(detail)))
    print("right" if right else "WRONG", name, detail, flush=True)


def python(code, *words, **env):
    process = subprocess.Popen([sys.executable, "-c", code, *words], env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    line = process.stdout.readline()
    if "ready" not in line:
        raise SystemExit(f"a job did not start: {line!r}")
    return process


def gpureap(*words):
    return subprocess.run([GPUREAP, *words], env=ENV, capture_output=True, text=True, timeout=120)


def report(*words):
    done = gpureap("report", "--json", "--since", "1h", *words)
    if done.returncode:
        raise SystemExit(f"report: exit {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def of(pid, until=lambda process: process["death"] and process["closed"]):
    """The process in the report, as soon as its end is in there."""
    end = time.monotonic() + 15
    while True:
        found = [process for process in report()["processes"] if process["pid"] == pid]
        if found and until(found[0]) or time.monotonic() > end:
            return found[0] if found else None
        time.sleep(0.3)


def incident_of(pid):
    return next((entry for entry in report()["incidents"] if any(member["pid"] == pid for member in entry["processes"])), None)


def main():
    log = open(f"{OUT}/daemon.log", "w")
    daemon = subprocess.Popen([GPUREAP, "-v", "daemon"], env=ENV, stdout=log, stderr=log)
    time.sleep(3)
    events = subprocess.Popen([GPUREAP, "events", "--follow", "--json"], env=ENV, stdout=open(f"{OUT}/events.ndjson", "w"))
    time.sleep(1)
    figures = {}

    # P1
    job = python(HOLD)
    time.sleep(2)
    killer = subprocess.run(["sh", "-c", f"kill -9 {job.pid}"], start_new_session=True)
    job.wait()
    process = of(job.pid)
    death = process["death"]
    check("P1 kill -9 by a shell: killed-by, the shell named", death["cause"] == "killed-by" and death["signal"] == "SIGKILL" and death["sender"]["comm"] in ("sh", "dash", "bash"), death["evidence"])
    figures["exited to closed, 64 MiB, kill -9"] = (process["exited"], process["closed"])
    check("P11 threads by name", any("cuda" in thread["name"] for thread in process["threads"]), sorted({thread["name"] for thread in process["threads"]}))
    holds = [hold for hold in report()["holds"] if hold["pid"] == job.pid]
    gpus = [hold for hold in holds if hold["node"] == "/dev/nvidia0"]
    check("the hold on the GPU: attached, exited", len(gpus) == 1 and gpus[0]["role"] == "attached" and gpus[0]["ended"] == "exited", gpus)

    # reaped
    job = python(HOLD)
    time.sleep(2)
    done = gpureap("reap", "--gpu", "0", "--now", "--yes")
    job.wait()
    death = of(job.pid)["death"]
    check("reaped by gpureap", done.returncode == 0 and death["cause"] == "reaped", death["evidence"])

    # F7
    code = HOLD.replace("print('ready', flush=True)\ntime.sleep(600)", "import os\nc = os.fork()\nprint('ready', c, flush=True) if c else None\ntime.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = int(parent.stdout.readline().split()[1])
    time.sleep(2)
    parent.kill(); parent.wait()
    time.sleep(1)
    mine = [hold for hold in report()["holds"] if hold["pid"] == child and hold["node"] == "/dev/nvidia0"]
    check("F7 the child holds what its dead parent opened", len(mine) == 1 and mine[0]["inherited_from"] == parent.pid and mine[0]["released"] is None, mine)
    os.kill(child, signal.SIGKILL)
    process = of(child)
    check("F7 freed when the child dies", process is not None and process["closed"] is not None and [a["pid"] for a in process["lineage"]][:1] == [parent.pid])

    # P7
    job = python(BAD)
    job.wait()
    process = of(job.pid)
    entry = incident_of(job.pid)
    xids = report()["xids"]
    check("P7 a real Xid: number, GPU, pid, holders, class", any(x["xid"] == 31 and x["pid"] == job.pid and x["node"] == "/dev/nvidia0" and job.pid in [w["pid"] for w in x["holders"]] and x["class"] == "application" for x in xids), xids)
    check("P7 the Xid is part of the process's incident", entry and entry["xids"] and process["death"]["cause"] == "exited" and process["death"]["code"] == 1, entry and entry["title"])

    # P4
    many = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()) > 1
    if many:
        scene = subprocess.Popen([sys.executable, SCENARIOS, "nccl-timeout"], env={**os.environ, **RANKS}, stdout=subprocess.PIPE, text=True, start_new_session=True)
        pids = json.loads(scene.stdout.readline())["pids"]
    else:
        ranks = [python(ONE_GPU, str(rank), RANK=str(rank), LOCAL_RANK=str(rank), **RANKS) for rank in (0, 1)]
        pids = [rank.pid for rank in ranks]
    end = time.monotonic() + 90
    while time.monotonic() < end and not (of(pids[0], lambda process: True) or {}).get("death"):
        time.sleep(1)
    process = of(pids[0])
    death = process["death"]
    check("P4 SIGABRT raised by the NCCL watchdog thread", death["cause"] == "fault" and death["signal"] == "SIGABRT" and death["thread"]["name"] == "pt_nccl_watchdg", death["evidence"])
    entry = incident_of(pids[0])
    parts = {member["pid"]: member["part"] for member in entry["processes"]}
    check("P4 collective-timeout, the other rank stalled", entry["cause"] == "collective-timeout" and (not many and parts.get(pids[1]) == "stalled" or many), (entry["title"], parts))
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    time.sleep(2)

    # Memory samples, and nobody left.
    last = report()
    samples = [line for line in open(f"{OUT}/events.ndjson") if '"event":"memory"' in line]
    check("memory was sampled", len(samples) > 0, samples[:1])
    check("gpureap's own NVML child is in no hold", not any("gpureap" in hold["comm"] or hold["comm"] == "exe" for hold in last["holds"]), [hold["comm"] for hold in last["holds"]][:5])
    check("nobody holds", not any(hold["released"] is None for hold in last["holds"]))
    check("nothing was lost", not any(gap["events"] for gap in last["gaps"]), last["gaps"])
    replayed = subprocess.run([GPUREAP, "report", "--json", "--since", "1h", "--journal", f"{OUT}/events.ndjson"], env=ENV, capture_output=True, text=True)
    causes = lambda r: sorted((p["pid"], p["death"]["cause"]) for p in r["processes"] if p["death"])
    check("the recording gives the same deaths", causes(json.loads(replayed.stdout)) == causes(last), replayed.stderr)
    rss = next(line for line in open(f"/proc/{daemon.pid}/status") if line.startswith("VmRSS"))
    json.dump(last, open(f"{OUT}/report.json", "w"), indent=1)
    open(f"{OUT}/report.txt", "w").write(gpureap("report", "--since", "1h").stdout)
    gpureap("report", "--since", "1h", "--html", f"{OUT}/report.html")
    daemon.terminate(); daemon.wait(20); events.wait(20)
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip().splitlines()
    with open(f"{OUT}/checks.md", "w") as page:
        page.write(f"{datetime.date.today()}, {len(driver)} x {driver[0]}, kernel {platform.release()}, {'two ranks on two GPUs' if many else 'two processes on one GPU'}; daemon {rss.split(':')[1].strip()}\n\n")
        page.writelines(f"- {'right' if right else 'WRONG'}: {name}\n" for name, right, _ in checks)
        page.writelines(f"- {name}: {value}\n" for name, value in figures.items())
    sys.exit(not all(right for _, right, _ in checks))


main()
