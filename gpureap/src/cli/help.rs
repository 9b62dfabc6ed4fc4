//! What stands below the options in the help of a command: examples, and exit codes.

pub(super) const REAP_HELP: &str = "\
Example:
  gpureap reap --gpu 0 --dry-run
  gpureap reap --gpu 0 --grace 30s --yes
  gpureap reap --gpu 0 --fence --scope tree --yes
  gpureap reap --slurm-job 4711 --yes
  gpureap reap --tree-of 1234 --env WORLD_SIZE=8 --dry-run
  gpureap reap --include-protected dcgm --yes
  gpureap reap --now --yes

Exit codes:
  0 free, verified; 3 still held; 4 held by a process that cannot be killed; 5 held only by protected processes;
  6 no process left but a kernel reference remains; 7 not permitted; 8 this host cannot do it";

pub(super) const REPORT_HELP: &str = "\
Example:
  gpureap report
  gpureap report --since 2h --gpu 0
  gpureap report --at 2026-12-01T03:14
  gpureap report --boot -1
  gpureap report --since 1d --html incident.html
  gpureap report --journal node1.db node2.db --json

Times are UTC; 2h means two hours ago.";

pub(super) const BLOCKERS_HELP: &str = "\
Example:
  gpureap blockers --for reset --gpu 0
  gpureap blockers --for unload --json

Exit codes:
  0 nothing is in the way; 3 jobs are; 5 only monitors and services; 6 only modules, settings or files without a process;
  7 too little may be seen to say; 8 this host has no NVIDIA driver";

pub(super) const CHECK_HELP: &str = "\
Example:
  gpureap check
  gpureap check --free --gpu 0 --gpu 1 --except-slurm-job 41,42
  gpureap check --orphans --xids 1h --daemon --max-bytes 80

Without --free and --orphans only processes count that were told to die and do not.

Exit codes:
  0 nothing found; 3 held by a job (--free, --orphans); 4 held by a process that cannot be killed; 6 an Xid of the hardware or
  the driver (--xids); 7 too little may be seen to say; 8 this host cannot do it, or no daemon runs (--daemon)";

pub(super) const FENCE_HELP: &str = "\
Example:
  gpureap fence --gpu 0 --ttl 10m
  gpureap fence --exempt-cgroup nvidia-dcgm.service --exempt-pid 812
  gpureap fence --list

Opens fail with EPERM for everybody, root and containers included, but not for the exempt. access(2) for reading or
writing fails too; stat(2) and making a node do not. The fence stays when this command ends, and it ends by itself
when its time is over. A GPU that is fenced already gets the new time; the exempt are added.";

pub(super) const WAIT_HELP: &str = "\
Example:
  gpureap wait --gpu 0
  gpureap wait --gpu 0 --timeout 5m --json
  gpureap wait --match any --ignore-monitors --timeout 1m

Exit codes:
  0 free, verified; when the time is up: 3 still held, 4 held by a process that SIGKILL does not end, 5 held only by
  monitors and protected processes, 6 no process left but a kernel reference remains; 7 not permitted to see who holds;
  8 this host cannot do it";

pub(super) const TOP_HELP: &str = "\
Example:
  gpureap top
  gpureap top --gpu 0 --older-than 12h

Press ? for the keys. What kills or fences asks first.";
