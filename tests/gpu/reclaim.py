#!/usr/bin/env python3
"""Tries the rules of reclaiming on a GPU host with real CUDA jobs, and writes what happened.

    reclaim.py GPUREAP SCENARIOS OUT

GPUREAP    the binary
SCENARIOS  as for measure.py
OUT        a directory for reclaim.json and reclaim.md

Needs root. Exit 0 only if every check held. Settings of the GPUs are left as they are.
"""
import json, os, platform, select, signal, subprocess, sys, tempfile, time

GPUREAP, SCENARIOS, OUT = sys.argv[1:4]
ROUNDS = 3
USUAL = "fuser -k /dev/nvidia* >/dev/null 2>&1; sleep 2; nvidia-smi | grep -c 'No running processes'"
checks, figures = [], {}


def check(name, right, detail=""):
    checks.append({"name": name, "right": bool(right), "detail": detail})
    print("right" if right else "WRONG", name, detail, flush=True)


def smi(query):
    done = subprocess.run(["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def gpureap(*words, timeout=180):
    begun = time.monotonic()
    done = subprocess.run([GPUREAP, *words, "--json"], capture_output=True, text=True, timeout=timeout)
    ms = (time.monotonic() - begun) * 1e3
    try:
        return json.loads(done.stdout), done.returncode, ms
    except json.JSONDecodeError:
        raise SystemExit(f"{words}: exit {done.returncode}: {done.stderr}")


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def holding():
    """Waits until somebody holds a GPU: CUDA takes seconds to start."""
    until = time.monotonic() + 60
    while time.monotonic() < until and not gpureap("holders")[0]["holders"]:
        time.sleep(0.5)


class Scene:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, SCENARIOS, self.name], stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.told = json.loads(self.process.stdout.readline())
        time.sleep(1)
        return self

    def __exit__(self, *_):
        for pid in self.told.get("pids", []) + self.told.get("workers", []) + self.told.get("helpers", []):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        time.sleep(1)


def figures_of(report):
    return {device["node"]: {key: device[key] for key in ("closed_ms", "memory_free_ms", "memory")} for device in gpus_of(report)}


def gpus_of(report):
    """Not the entry for minors that nobody knows."""
    return [device for device in report["devices"] if device["kind"] == "gpu" and "*" not in device["node"]]


def facts():
    """V1: exited, closed and memory free are three facts."""
    for name in ("context:0", "big", "pinned", "ghost", "zombie-leader"):
        with Scene(name) as scene:
            report, code, ms = gpureap("reap", "--now", "--yes")
            pid = scene.told["pids"][0]
            free = all(device["memory"] and device["memory"]["state"] == "free" for device in gpus_of(report))
            check(f"V1 {name}: free, and NVML confirms the memory", code == 0 and free and not alive(pid), f"{ms:.0f} ms {report['notes']}")
            figures[f"reap {name}"] = {"ms": ms, **figures_of(report)}
            used = [int(line) for line in smi("gpu=memory.used")]
            check(f"V1 {name}: nvidia-smi agrees", all(mib <= 16 for mib in used), str(used))


def others():
    """F11, F12, K13: a job on another GPU is left alone."""
    many = len(smi("gpu=name")) > 1
    with Scene("context:0") as scene:
        pid = scene.told["pids"][0]
        if many:
            report, code, _ = gpureap("reap", "--gpu", "1", "--now", "--yes")
            skipped = [(entry["pid"], entry["reason"]) for entry in report["skipped"]]
            check("F11: reap --gpu 1 leaves the job on GPU 0", code == 0 and alive(pid) and skipped == [(pid, "handle-only")], str(skipped))
        report, code, _ = gpureap("reap", "--gpu", "0", "--grace", "5s", "--yes")
        check("F11: reap --gpu 0 ends it", code == 0 and not alive(pid), report["outcome"])
    with Scene("enumerate") as scene:
        pid = scene.told["pids"][0]
        seen, _, _ = gpureap("holders")
        roles = {row["role"] for holder in seen["holders"] if holder["pid"] == pid for row in holder["devices"] if row["role"]}
        report, code, _ = gpureap("reap", "--gpu", "0", "--now", "--yes")
        check("F12: a process that only counted the GPUs has handles and is left alone", roles == {"handle"} and alive(pid) and code == 0, str(roles))


def stubborn():
    with Scene("stubborn") as scene:
        report, code, ms = gpureap("reap", "--grace", "2s", "--yes")
        sent = [signal["signal"] for process in report["processes"] for signal in process["signals"]]
        check("K1: TERM, and KILL after the grace period", code == 0 and sent == ["SIGTERM", "SIGKILL"], f"{sent} {ms:.0f} ms")


def supervisor():
    with Scene("respawn") as scene:
        parent = scene.told["pids"][0]
        holding()
        report, code, _ = gpureap("reap", "--now", "--yes")
        # CUDA takes seconds to start, so the new worker may not hold anything yet.
        check("K9: without a fence the supervisor lives", alive(parent) and code in (0, 3), f"exit {code}, {len(report['respawned'])} respawned")
        holding()
        report, code, ms = gpureap("reap", "--now", "--fence", "--yes")
        check("K9: behind a fence nobody comes back while it runs", code == 0 and not report["respawned"], f"{ms:.0f} ms, {report['fence']}")
        # The fence of a longer reap meets the new worker: the supervisor starts one every few seconds.
        holding()
        gpureap("fence", "--ttl", "60s")
        report, code, ms = gpureap("reap", "--now", "--yes")
        time.sleep(20)
        held, _, _ = gpureap("holders")
        fence, _, _ = gpureap("fence", "--list")
        denied = sum(entry["count"] for entry in fence["denied"])
        check("K9: a pinned fence refuses the supervisor's workers for 20 s", not held["holders"] and denied > 0, f"{denied} opens refused")
        figures["opens refused in 20 s"] = denied
        gpureap("unfence")
        holding()
        report, code, _ = gpureap("reap", "--now", "--scope", "tree", "--yes")
        check("K10: --scope tree ends the supervisor with its worker", code == 0 and not alive(parent), f"exit {code}")


def tree():
    with Scene("tree") as scene:
        told = scene.told
        report, code, ms = gpureap("reap", "--scope", "tree", "--grace", "5s", "--yes")
        left = [pid for pid in told["pids"] + told["workers"] + told["helpers"] if alive(pid)]
        via = sorted({process["via"] for process in report["processes"]})
        check("K10: a tree takes launcher, workers and helpers", code == 0 and not left and via == ["device", "tree"], f"{left} {via}")


def waiting():
    for _ in range(ROUNDS):
        with Scene("context:0") as scene:
            pid = scene.told["pids"][0]
            waiter = subprocess.Popen([GPUREAP, "wait", "--gpu", "0", "--json"], stdout=subprocess.PIPE, text=True)
            time.sleep(2)
            pidfd = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([pidfd], [], [], 60)
            ended = time.monotonic()
            waiter.wait(60)
            late = (time.monotonic() - ended) * 1e3
            os.close(pidfd)
            check("V7: wait returns when the GPU is free", waiter.returncode == 0, f"{late:.1f} ms after the holder's end, process exit included")
            figures.setdefault("wait after the end, ms", []).append(late)


def usual():
    for _ in range(ROUNDS):
        with Scene("context:0"):
            begun = time.monotonic()
            done = subprocess.run(["sh", "-c", USUAL], capture_output=True, text=True)
            figures.setdefault("usual line, ms", []).append((time.monotonic() - begun) * 1e3)
            figures.setdefault("usual line says", []).append(done.stdout.strip())
        with Scene("context:0"):
            report, code, ms = gpureap("reap", "--now", "--yes")
            figures.setdefault("reap --now, ms", []).append(ms)
            check("reap beside the usual line", code == 0 and report["verified"], f"{ms:.0f} ms")
    with Scene("zombie-leader") as scene:
        done = subprocess.run(["sh", "-c", USUAL], capture_output=True, text=True)
        used = max(int(line) for line in smi("gpu=memory.used"))
        figures["usual line on a zombie leader"] = {"says": done.stdout.strip(), "memory still used, MiB": used}
        report, code, _ = gpureap("reap", "--now", "--yes")
        check("F6: reap frees what the usual line leaves", code == 0, str(figures["usual line on a zombie leader"]))


def blockers():
    with Scene("context:0") as scene:
        pid = scene.told["pids"][0]
        for operation in ("reset", "unload", "mig"):
            report, code, _ = gpureap("blockers", "--for", operation)
            pids = [entry["process"]["pid"] for entry in report["blockers"] if entry["process"]]
            check(f"V6: blockers --for {operation} names the job", code == 3 and pid in pids, f"{len(report['blockers'])} blockers, nvml {report['nvml']}")
            figures[f"blockers {operation}"] = [[entry["kind"], entry["standing"], entry["module"] or entry["why"], entry["release"]] for entry in report["blockers"]]


def main():
    os.makedirs(OUT, exist_ok=True)
    place = tempfile.mkdtemp()
    os.environ.update(GPUREAP_RUN_DIR=f"{place}/run", GPUREAP_STATE_DIR=f"{place}/state")
    log = open(f"{OUT}/daemon.log", "w")
    daemon = subprocess.Popen([GPUREAP, "-v", "daemon"], stderr=log, stdout=log, start_new_session=True)
    until = time.monotonic() + 30
    while time.monotonic() < until and gpureap("holders")[0]["source"] != "map":
        time.sleep(0.2)
    about = {"date": time.strftime("%Y-%m-%d"), "kernel": platform.release().split("-")[0], "gpus": smi("gpu=name"), "driver": smi("gpu=driver_version")[0]}
    for part in (facts, others, stubborn, tree, supervisor, waiting, usual, blockers):
        try:
            part()
        except Exception as error:
            check(part.__name__, False, repr(error))
    daemon.send_signal(signal.SIGTERM)
    daemon.wait(10)
    json.dump({"about": about, "checks": checks, "figures": figures}, open(f"{OUT}/reclaim.json", "w"), indent=1)
    lines = [f"{about}", ""] + [f"| {'yes' if one['right'] else 'NO'} | {one['name']} | {one['detail']} |" for one in checks]
    open(f"{OUT}/reclaim.md", "w").write("\n".join(lines) + "\n")
    print(json.dumps(figures, indent=1))
    sys.exit(not all(one["right"] for one in checks))


main()
