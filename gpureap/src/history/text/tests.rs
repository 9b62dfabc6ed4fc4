use super::*;
use crate::history::samples;

const TERMINAL: Style = Style { width: Some(80), colours: false };

fn text(report: &Report) -> String {
    render(report, Style::default())
}

#[test]
fn an_empty_window_says_what_to_try() {
    let expected = r"node7, 2026-03-14 02:50:00 to 03:20:00 UTC: no incident; nobody holds a GPU now
Nothing is recorded of this time. Try an earlier --since, for example --since 7d, or --boot -1 for the boot before.
";
    assert_eq!(text(&samples::empty()), expected);
}

#[test]
fn an_out_of_memory_kill_names_the_cgroup() {
    let expected = r"node7, 2026-03-14 02:50:00 to 03:20:00 UTC: 1 incident; python3 5900 of alice holds GPU 0 now

#1  03:05:01  python3 was killed for want of memory: container llm-serve was at its limit
    oom-kill; container llm-serve; GPU 0 free 03:05:02, 1.2 s after the first death
    first     03:05:01.050  python3 5200: killed by the kernel at the memory limit of its cgroup
              python3 serve.py --preload all
              memory limit of /system.slice/docker-3f9c1be2d04a7785aa10c6ef2b9347d15e6c8f0912ab34cd56ef7890a1b2c3d4.scope
    because   the kernel marked pid 5200 as its victim 3 ms before the death

GPU 0  /dev/nvidia0  NVIDIA H200  0000:18:00.0  GPU-0a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a01
  FROM      TO            FOR  ROLE       PID  USER   JOB                  ENDED                   COMMAND
  02:51:45  03:05:02  13m 17s  attached  5200  root   container llm-serve  out of memory (cgroup)  python3 serve.py --preload all
  03:05:34  -         14m 26s  attached  5900  alice  container llm-serve  held still              python3 serve.py --preload all

Lineage
  containerd-shim 5170  /usr/bin/containerd-shim-runc-v2 -namespace moby
    sh 5190 ✕ exited 137  /bin/sh -c 'python3 serve.py --preload all'
      python3 5200 ✕ out of memory (cgroup)  python3 serve.py --preload all
  python3 5900  python3 serve.py --preload all
";
    assert_eq!(text(&samples::oom()), expected);
}

#[test]
fn a_kill_names_who_sent_it_and_who_started_that() {
    let expected = r"node7, 2026-03-14 02:50:00 to 03:20:00 UTC: 1 incident; nobody holds a GPU now

#1  03:01:35  3 processes of alice were killed by pkill, which bob had started with sudo
    killed-by; lineage bash 2950; GPUs 0-1 free 03:01:35, 202 ms after the first death
    first     03:01:35.201  python3 3001: killed by SIGKILL from pkill (pid 812)
              python3 sweep.py --seed=0
              sender pkill 812 of root: pkill -9 python
              started by sudo 810 (exited 0) < bash 700 < sshd 650
    followed  03:01:35.202  python3 3002: killed by SIGKILL from pkill (pid 812)
    followed  03:01:35.203  python3 3003: killed by SIGKILL from pkill (pid 812)
    because   one pkill (pid 812) sent SIGKILL to all of them within 2 ms

GPU 0  /dev/nvidia0  NVIDIA H200  0000:18:00.0  GPU-0a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a01
  FROM      TO           FOR  ROLE       PID  USER   ENDED                   COMMAND
  02:59:02  03:01:35  2m 33s  attached  3001  alice  SIGKILL from pkill 812  python3 sweep.py --seed=0
  02:59:02  03:01:35  2m 33s  attached  3003  alice  SIGKILL from pkill 812  python3 sweep.py --seed=2

GPU 1  /dev/nvidia1  NVIDIA H200  0000:28:00.0  GPU-1a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a11
  02:59:02  03:01:35  2m 33s  attached  3002  alice  SIGKILL from pkill 812  python3 sweep.py --seed=1

Lineage
  bash 2950  -bash
    python3 3001 ✕ SIGKILL from pkill 812  python3 sweep.py --seed=0
    python3 3002 ✕ SIGKILL from pkill 812  python3 sweep.py --seed=1
    python3 3003 ✕ SIGKILL from pkill 812  python3 sweep.py --seed=2
";
    assert_eq!(text(&samples::pkill()), expected);
}

#[test]
fn at_an_instant_the_holders_are_told() {
    let expected = r"node7, at 2026-03-14 03:15:00 UTC: python3 7001 of alice held GPU 0, 1 other has handles

GPU 0  /dev/nvidia0  NVIDIA H200  0000:18:00.0  GPU-0a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a01
  FROM      TO            FOR  ROLE       PID  USER   ENDED             COMMAND
  02:59:10  03:16:40  17m 30s  attached  7001  alice  closed, lived on  python3 finetune.py
  02:59:10  03:16:40  17m 30s  handle    7002  alice  closed, lived on  python3 finetune.py

GPU 1  /dev/nvidia1  NVIDIA H200  0000:28:00.0  GPU-1a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a11  nobody held it

Lineage
  tmux 6990  tmux
    2 × python3 7001-7002  python3 finetune.py
";
    assert_eq!(text(&samples::at_an_instant()), expected);
}

#[test]
fn a_host_that_went_down_is_told_with_the_last_sign_of_life() {
    let expected = r"node7, 2026-03-14 02:50:00 to 03:20:00 UTC: 1 incident; nobody holds a GPU now
node7: went down; the last sign of life is of 2026-03-14 03:06:52 UTC

#1  03:06:52  node7 went down between 03:06:52 and 03:10:40 while 2 GPUs were held
    host-down; host node7; GPUs 0-1 held at the end
    first     simulate 8101: held when the record of its boot ends
              ./simulate --steps=1e9
    because   the record ends without a stop, and the next one is of another boot

GPU 0  /dev/nvidia0  NVIDIA H200  0000:18:00.0  GPU-0a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a01
  FROM      TO            FOR  ROLE       PID  USER   JOB         ENDED           COMMAND
  02:55:02  03:06:52  11m 50s  attached  8101  alice  job 4802.0  host went down  ./simulate --steps=1e9

GPU 1  /dev/nvidia1  NVIDIA H200  0000:28:00.0  GPU-1a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a11
  02:55:02  03:06:52  11m 50s  attached  8101  alice  job 4802.0  host went down  ./simulate --steps=1e9

Lineage
  slurmstepd 8090  'slurmstepd: [4802.0]'
    simulate 8101 ✕ host went down  ./simulate --steps=1e9

gap: from 03:10:40 to 03:11:02, the host had booted, the daemon had not started
";
    assert_eq!(text(&samples::host_down()), expected);
}

#[test]
fn a_watchdog_abort_tells_the_thread_and_who_had_stalled() {
    let expected = r"node7, 2026-03-14 02:50:00 to 03:20:00 UTC: 1 incident; nobody holds a GPU now

#1  03:12:07  rank 0 was aborted by its NCCL watchdog: rank 1 had stalled
    collective-timeout; rank set 10.0.0.7:29500, 2 ranks; GPUs 0-1 free 03:12:08, 1.3 s after the first death
    first     03:12:07.412  rank 0 python3 4711: SIGABRT raised by its own thread pt_nccl_watchdg
              /opt/venv/bin/python3 -u train.py
              thread pt_nccl_watchdg 4790, core dumped
    stalled   03:12:08.101  rank 1 python3 4712: slept in futex_wait_queue; then killed by SIGTERM from torchrun (pid 4700)
              sender torchrun 4700 of alice: /opt/venv/bin/torchrun --nproc-per-node=2 train.py
              started by bash 4650 < sshd 4601
    because   the first death is an abort by a watchdog thread, not a signal from outside
              rank 1 slept in futex_wait_queue when rank 0 died

";
    let text = text(&samples::watchdog());
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("\n            threads: cuda-EvtHandlr, pt_nccl_watchdg, pt_nccl_heartbt\n"), "{text}");
}

#[test]
fn xids_are_told_with_their_gpu_and_its_holders() {
    let expected = r"
Xids
  03:08:25.488  GPU 0  Xid 31 GPU memory page fault, the application; names pid 6200 (python3)
              held by python3 6200
              pid=6200, name=python3, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_40000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
  03:15:00.000  GPU 1  Xid 63 row remapping recorded, the hardware; names no process
              nobody held it then
              Row Remapper: New row marked for remapping, reset gpu to activate.
";
    let text = text(&samples::xid());
    assert!(text.ends_with(expected), "{text}");
    // The newest incident stands first.
    assert!(text.find("\n#2  ").unwrap() < text.find("\n#1  ").unwrap(), "{text}");
}

#[test]
fn fifty_holders_are_a_few_lines() {
    let incident = r"
#2  03:12:32  rank 3 of job 771204 was killed for want of memory; the NCCL watchdogs of 7 ranks fired 60 s later
    oom-kill; slurm job 771204; GPUs 0-7 free 03:13:38, 66.5 s after the first death; Xid 45
    first     03:12:32.400  rank 3 python3 20503: killed by the kernel at the memory limit of job_771204
              /opt/conda/bin/python3 -u pretrain.py --config=7b.toml
              memory limit of /system.slice/slurmstepd.scope/job_771204
    followed  03:12:36.400  40 × pt_data_worker: exited 1 after its parent had died
              pids 20600-20639, the last 03:13:38.870
    followed  03:13:32.500  7 × python3: SIGABRT raised by its own thread pt_nccl_watchdg, 60 s after rank 3 was gone
              pids 20500-20502, 20504-20507, the last 03:13:34.670
    because   the first death is an out-of-memory kill at the limit of job_771204
              the other ranks were alive for 60 s more and were aborted by their own pt_nccl_watchdg threads
              Xid 45 on GPU 5 came after the process it names had been aborted
";
    let gpu = r"
GPU 5  /dev/nvidia5  NVIDIA H200  0000:68:00.0  GPU-5a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a51
  <02:50:00  -         >30m 0s  handle     1412  root                 held still                             /usr/bin/dcgm-exporter
    held since before the record
  02:50:15   02:59:30   9m 15s  attached  19005  alice                exited 0                               python3 eval.py --suite=all
  03:01:15   03:13:38  12m 20s  handle     42 ×  alice  job 771204.0  exited 1, or 2 other ways              pt_data_worker, python3
    pids 20500-20504, 20506-20507, 20600-20624, 20630-20639
  03:01:15   03:13:35  12m 20s  attached  20505  alice  job 771204.0  SIGABRT by its thread pt_nccl_watchdg  rank 5: /opt/conda/bin/python3 -u pretrain.py --config=7b.toml
  03:01:31   03:13:38   12m 7s  attached    5 ×  alice  job 771204.0  exited 1                               [pt_data_worker] /opt/conda/bin/python3 -u pretrain.py --config=7b.toml
    pids 20625-20629, inherited
";
    let text = text(&samples::slurm());
    assert!(text.contains(incident), "{text}");
    assert!(text.contains(gpu), "{text}");
    let tree =
        "\n        5 × pt_data_worker 20615-20619 ✕ exited 1  /opt/conda/bin/python3 -u pretrain.py --config=7b.toml\n";
    assert!(text.contains(tree), "{text}");
    let gap =
        "\ngap: from 02:57:00 to 02:57:48, the daemon was restarted; the kernel went on counting (3 events lost)\n";
    assert!(text.ends_with(gap), "{text}");
}

#[test]
fn several_hosts_are_told_apart() {
    let text = text(&samples::two_hosts());
    for line in [
        "node7, node8, 2026-03-14 02:50:00 to 03:20:00 UTC: 1 incident; nobody holds a GPU now\n",
        "\nnode8: the recorder was stopped at 2026-03-14 03:18:20 UTC\n",
        "\nnode8: its clock was moved by -3.250 s while it was recorded\n",
        "GPUs 0-1 (node7) free 03:12:08, 1.3 s after the first death\n",
        "rank 0 python3 4711 (node7): SIGABRT raised",
        "\nGPU 0 (node8)  /dev/nvidia0",
        "gone when next looked",
        "\n    received from another process\n",
        "\n    its open may have failed\n",
        "\n  python3 4711 (node8)  python3 train.py\n",
        "\nnote: the clocks of 2 hosts were not compared",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn another_day_is_told_with_its_date() {
    let mut report = samples::oom();
    report.since = "2026-03-12T00:00:00Z".parse().unwrap();
    let text = text(&report);
    assert!(text.starts_with("node7, 2026-03-12 00:00:00 to 2026-03-14 03:20:00 UTC: 1 incident"), "{text}");
    assert!(text.contains("\n#1  03-14 03:05:01  python3 was killed"), "{text}");
    assert!(text.contains("first     03-14 03:05:01.050  python3 5200"), "{text}");
}

#[test]
fn a_window_that_is_over_tells_of_its_end() {
    let mut report = samples::oom();
    report.time = "2026-03-15T00:00:00Z".parse().unwrap();
    assert!(text(&report).contains(": 1 incident; python3 5900 of alice holds GPU 0 at its end\n"));
}

#[test]
fn lineages_of_different_lengths_make_one_tree() {
    let mut report = samples::watchdog();
    report.processes[0].lineage.truncate(1);
    let tree = |report: &Report| {
        let text = text(report);
        text[text.find("Lineage\n").unwrap()..].to_owned()
    };
    assert_eq!(tree(&report), tree(&samples::watchdog()));
    // A circle cannot be, and loses nobody.
    let itself = report.processes[0].who.clone();
    report.processes[0].lineage[0].pid = itself.pid;
    report.processes[0].lineage[0].start_ns = itself.start_ns;
    assert!(tree(&report).contains("rank 0 python3 4711"), "{}", tree(&report));
}

/// `nvidia-smi` in a loop: one line, not hundreds.
#[test]
fn brief_looks_of_a_monitor_are_one_line() {
    let mut report = samples::oom();
    let hold = report.holds[0].clone();
    for number in 0..300_u32 {
        let mut look = hold.clone();
        look.who.pid = 10_000 + number;
        look.comm = "nvidia-smi".to_owned();
        look.opened = report.since + jiff::SignedDuration::from_secs(i64::from(number) * 5);
        look.released = Some(look.opened + jiff::SignedDuration::from_millis(400));
        look.ended = Some(super::super::rows::HoldEnd::Closed);
        report.holds.push(look);
    }
    let text = text(&report);
    assert!(text.contains("  300 ×  "), "{text}");
    assert!(text.contains("\n    pids 10000-10299\n"), "{text}");
    assert!(text.lines().count() < 30, "{text}");
}

#[test]
fn lines_end_at_the_edge_of_the_terminal() {
    for (name, report) in samples::all() {
        for width in [40, 80, 120] {
            for line in render(&report, Style { width: Some(width), ..TERMINAL }).lines() {
                assert!(line.width() <= width, "{name}, {width}: {line}");
            }
        }
    }
    // Sentences go on, tables are cut.
    let text = render(&samples::watchdog(), TERMINAL);
    assert!(
        text.contains("\n    first     03:12:07.412  rank 0 python3 4711: SIGABRT raised by its own\n              thread pt_nccl_watchdg\n"),
        "{text}"
    );
    assert!(text.contains("…\n"), "{text}");
}

#[test]
fn colours_only_when_asked_for() {
    for (_, report) in samples::all() {
        assert!(!render(&report, TERMINAL).contains('\u{1b}'));
    }
    let text = render(&samples::oom(), Style { colours: true, ..TERMINAL });
    assert!(text.starts_with("\u{1b}[1mnode7, "), "{text}");
    assert!(text.contains("\n\u{1b}[31m#1  03:05:01  python3 was killed"), "{text}");
}

#[test]
fn names_cannot_reach_the_terminal() {
    for style in [Style::default(), TERMINAL] {
        let text = render(&samples::hostile(), style);
        let unsafe_ = text
            .chars()
            .find(|character| *character != '\n' && escape(&character.to_string()) != character.to_string());
        assert_eq!(unsafe_, None, "{text}");
        assert!(text.contains(r"a\u{202e}gpj.exe\u{2066}\u{200b} 1002"), "{text}");
    }
}
