#!/usr/bin/env python3
"""Runs gpureap against real CUDA situations on a GPU host, and writes what it saw.

    measure.py GPUREAP SCENARIOS OUT [NAME...]

GPUREAP    the binary
SCENARIOS  a program that is called with a scenario's name, starts its processes, prints one JSON line
           {"scenario", "pids", ...} when they hold the GPU, and sleeps until it is killed
OUT        a directory for results.json and results.md

Needs root. Each scenario is shown by `gpureap holders`, checked, freed by `gpureap reap --now` and looked at again,
with `fuser` and `nvidia-smi` beside it. Exit 0 only if every check held.
"""
import json, os, platform, shutil, signal, subprocess, sys, tempfile, time

GPUREAP, SCENARIOS, OUT = sys.argv[1:4]
WANTED = sys.argv[4:] or ["context:0", "enumerate", "ghost", "zombie-leader", "big", "pinned", "tree", "stubborn"]


def run(*command, timeout=120):
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done, (time.monotonic() - begun) * 1e3


def smi(query):
    done, _ = run("nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def memory():
    return [int(line) for line in smi("gpu=memory.used")]


def holders(*more):
    done, ms = run(GPUREAP, "holders", "--json", *more)
    if done.returncode:
        raise SystemExit(f"holders: exit {done.returncode}: {done.stderr}")
    return json.loads(done.stdout), ms


def gpu_rows(holder):
    return {row["node"]: row for row in holder["devices"] if row["role"] is not None}


def expected(name, told, seen):
    """Complaints about what is shown; empty when it is right."""
    by_pid = {holder["pid"]: holder for holder in seen["holders"]}
    want = set(told.get("workers") or told["pids"])
    wrong = []
    if set(by_pid) != want:
        wrong.append(f"holders {sorted(by_pid)}, expected {sorted(want)}")
    for pid in want & set(by_pid):
        holder, rows = by_pid[pid], gpu_rows(by_pid[pid])
        roles = {node: row["role"] for node, row in rows.items()}
        if name == "enumerate":
            if set(roles.values()) != {"handle"}:
                wrong.append(f"{pid}: roles {roles}, expected handles alone")
        elif name == "ghost":
            origins = {row["inherited_from"] for row in rows.values()}
            if origins != {told["dead"]}:
                wrong.append(f"{pid}: inherited from {origins}, expected {told['dead']}")
        elif name != "zombie-leader":
            # The leader of a zombie has given up its address space only when all threads are gone: it maps too.
            if roles.get("/dev/nvidia0") != "attached":
                wrong.append(f"{pid}: {roles} on GPU 0, expected attached")
        others = {role for node, role in roles.items() if node != "/dev/nvidia0"}
        if name.startswith("context") and others - {"handle"}:
            wrong.append(f"{pid}: roles {roles}, expected handles beside GPU 0")
        if name == "zombie-leader" and "zombie-leader" not in holder["how"]:
            wrong.append(f"{pid}: how {holder['how']}, expected zombie-leader")
    return wrong


def fuser(nodes):
    if not shutil.which("fuser"):
        return None, None
    done, ms = run("fuser", *nodes)
    return sorted({int(word.strip("cefFrm")) for word in done.stdout.split()}), ms


def scenario(name):
    before = memory()
    process = subprocess.Popen([sys.executable, SCENARIOS, name], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        told = json.loads(process.stdout.readline())
        time.sleep(1.5)
        seen, holders_ms = holders()
        looks = sorted(holders()[1] for _ in range(9))
        held = memory()
        nodes = [device["node"] for device in seen["devices"] if device["kind"] == "gpu"]
        by_fuser, fuser_ms = fuser(nodes)
        apps = smi("compute-apps=pid,used_memory")
        wrong = expected(name, told, seen)
        done, reap_ms = run(GPUREAP, "reap", "--now", "--yes", "--json", timeout=120)
        report = json.loads(done.stdout)
        after = memory()
        left, _ = holders("--sweep")
        if done.returncode != 0 or report["outcome"] != "freed" or not report["verified"]:
            wrong.append(f"reap: exit {done.returncode}, {report['outcome']}, verified {report['verified']}")
        if left["holders"]:
            wrong.append(f"still held by {[holder['pid'] for holder in left['holders']]}")
        if any(now > base + 8 for now, base in zip(after, before)):
            wrong.append(f"memory used {after} MiB, {before} MiB before")
        return {
            "scenario": name, "told": told, "wrong": wrong, "source": seen["source"], "backend": seen["backend"],
            "holders": [{"pid": holder["pid"], "how": holder["how"], "devices": holder["devices"]} for holder in seen["holders"]],
            "holders_first_ms": holders_ms, "holders_median_ms": looks[len(looks) // 2],
            "fuser": by_fuser, "fuser_ms": fuser_ms, "nvidia_smi_compute_apps": apps,
            "memory_before_mib": before, "memory_held_mib": held, "memory_after_mib": after,
            "reap_ms": reap_ms, "reap": report,
        }
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        time.sleep(1)


def markdown(result):
    lines = [f"# gpureap on {result['gpus'][0]}", "", f"{result['date']}, {len(result['gpus'])} GPU, driver {result['driver']}, kernel {result['kernel']},",
             f"probe set `{result['backend']}`, gpureap built from {result['version']}. Times in milliseconds; `holders` is the median of nine whole", "processes, `reap` the whole process, `closed` the report's own figure from the signal to the last file.", ""]
    lines += ["| scenario | holders found | roles on the GPUs | right | holders | fuser finds | fuser | memory held, MiB | reap --now | closed | memory after, MiB |",
              "|---|---|---|---|---|---|---|---|---|---|---|"]
    for one in result["scenarios"]:
        roles = "; ".join(", ".join(f"{node.removeprefix('/dev/')} {row['role']} {row['fds']}+{row['maps']}" for node, row in gpu_rows(holder).items()) for holder in one["holders"])
        closed = max([row["closed_ms"] or 0 for row in one["reap"]["devices"]], default=0)
        found = "-" if one["fuser"] is None else f"{len(one['fuser'])} of {len(one['holders'])}"
        fuser_ms = "-" if one["fuser_ms"] is None else f"{one['fuser_ms']:.0f}"
        right = "yes" if not one["wrong"] else "NO: " + "; ".join(one["wrong"])
        lines.append(f"| {one['scenario']} | {len(one['holders'])} | {roles} | {right} | {one['holders_median_ms']:.1f} | {found} | {fuser_ms} | {one['memory_held_mib']} | {one['reap_ms']:.0f} | {closed:.0f} | {one['memory_after_mib']} |")
    return "\n".join(lines) + "\n"


def main():
    os.makedirs(OUT, exist_ok=True)
    run("nvidia-smi")
    doctor, _ = run(GPUREAP, "doctor")
    print(doctor.stdout, flush=True)
    place = tempfile.mkdtemp()
    os.environ.update(GPUREAP_RUN_DIR=f"{place}/run", GPUREAP_STATE_DIR=f"{place}/state")
    log = open(f"{OUT}/daemon.log", "w")
    daemon = subprocess.Popen([GPUREAP, "-v", "daemon"], stderr=log, stdout=log, start_new_session=True)
    until = time.monotonic() + 30
    while time.monotonic() < until and holders()[0]["source"] != "map":
        time.sleep(0.2)
    result = {
        "date": time.strftime("%Y-%m-%d"), "kernel": platform.release(), "gpus": smi("gpu=name"), "driver": smi("gpu=driver_version")[0],
        "version": run(GPUREAP, "--version")[0].stdout.strip(), "doctor": doctor.stdout, "backend": holders()[0]["backend"], "scenarios": [],
    }
    try:
        for name in WANTED:
            try:
                one = scenario(name)
            except Exception as error:
                print(f"{name}: {error!r}", flush=True)
                result["scenarios"].append({"scenario": name, "error": repr(error), "wrong": [repr(error)]})
                continue
            result["scenarios"].append(one)
            print(name, "right" if not one["wrong"] else one["wrong"], f"reap {one['reap_ms']:.0f} ms", flush=True)
    finally:
        rss = [line for line in open(f"/proc/{daemon.pid}/status") if line.startswith(("VmRSS", "VmHWM"))]
        result["daemon_memory"] = "".join(rss).split("\n")
        daemon.send_signal(signal.SIGTERM)
        result["daemon_exit"] = daemon.wait(10)
        log.close()
        json.dump(result, open(f"{OUT}/results.json", "w"), indent=1)
    good = [one for one in result["scenarios"] if "error" not in one]
    text = markdown({**result, "scenarios": good})
    open(f"{OUT}/results.md", "w").write(text)
    print(text, "daemon:", result["daemon_memory"], "exit", result["daemon_exit"])
    sys.exit(any(one["wrong"] for one in result["scenarios"]))


main()
