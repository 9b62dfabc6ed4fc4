//! The Slurm job of a process that is in no job's cgroup, from what it was started with.
//!
//! With `ProctrackType=proctrack/linuxproc` no process is in a job's cgroup, and one that has left its session and lost its
//! parent belongs to the job by nothing but its environment. The process itself chose that, so it can at worst be taken for a part
//! of a job that it is no part of, and end with that.

use super::Place;

/// `SLURM_EXTERN_CONT`, `SLURM_BATCH_SCRIPT` and `SLURM_INTERACTIVE_STEP`, slurm/slurm.h.
const STEPS: [(u32, &str); 3] = [(0xffff_fffc, "extern"), (0xffff_fffb, "batch"), (0xffff_fffa, "interactive")];

/// The numbers of jobs have 26 bits (`MAX_JOB_ID`), or 10 digits as a plain number.
const LONGEST: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmStep {
    pub job: String,
    /// Absent in a batch script's environment.
    pub step: Option<String>,
}

/// From the bytes of /proc/PID/environ. Of a variable that is there twice the first counts, as getenv(3) has it.
pub fn of_environment(environment: &[u8]) -> Option<SlurmStep> {
    let number = |name: &str| {
        let value = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        let is_number = !value.is_empty() && value.len() <= LONGEST && value.iter().all(u8::is_ascii_digit);
        std::str::from_utf8(value).ok().filter(|_| is_number).map(str::to_owned)
    };
    let job = number("SLURM_JOB_ID").or_else(|| number("SLURM_JOBID"))?;
    let step = number("SLURM_STEP_ID").or_else(|| number("SLURM_STEPID")).map(|step| {
        let special = STEPS.iter().find(|(value, _)| step.parse() == Ok(*value));
        special.map_or(step, |(_, name)| (*name).to_owned())
    });
    Some(SlurmStep { job, step })
}

impl Place {
    /// Fills in what the cgroup does not tell. Where that names a job, it is right whatever the environment says.
    pub fn or_job_of<E: AsRef<[u8]>>(&mut self, environment: impl FnOnce() -> Option<E>) {
        if self.slurm_job.is_none()
            && let Some(SlurmStep { job, step }) = environment().and_then(|bytes| of_environment(bytes.as_ref()))
        {
            self.slurm_job = Some(job);
            self.slurm_step = step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments() {
        for (environment, expected) in [
            ("PATH=/bin\0SLURM_JOB_ID=4711\0HOME=/", Some(("4711", None))),
            ("SLURM_JOB_ID=4711\0SLURM_STEP_ID=0\0", Some(("4711", Some("0")))),
            ("SLURM_JOBID=4711\0SLURM_STEPID=3", Some(("4711", Some("3")))),
            ("SLURM_JOB_ID=4711\0SLURM_STEP_ID=4294967292", Some(("4711", Some("extern")))),
            ("SLURM_JOB_ID=4711\0SLURM_STEP_ID=4294967291", Some(("4711", Some("batch")))),
            ("SLURM_JOB_ID=4711\0SLURM_STEP_ID=4294967290", Some(("4711", Some("interactive")))),
            ("SLURM_JOB_ID=1\0SLURM_JOB_ID=2", Some(("1", None))),
            ("SLURM_JOB_ID=4711\0SLURM_STEP_ID=x", Some(("4711", None))),
            ("SLURM_JOB_ID=47 11", None),
            ("SLURM_JOB_ID=12345678901", None),
            ("SLURM_JOB_ID=", None),
            ("SLURM_JOB_ID_HET_GROUP_0=1", None),
            ("XSLURM_JOB_ID=1", None),
            ("SLURM_STEP_ID=1", None),
            ("", None),
        ] {
            let found = of_environment(environment.as_bytes());
            let found = found.as_ref().map(|SlurmStep { job, step }| (job.as_str(), step.as_deref()));
            assert_eq!(found, expected, "{environment:?}");
        }
    }

    #[test]
    fn a_cgroup_is_right_whatever_the_environment_says() {
        let environment = || Some(b"SLURM_JOB_ID=7\0SLURM_STEP_ID=1".to_vec());
        for (cgroup, job, step) in [
            ("/system.slice/slurmstepd.scope/job_42/step_batch", "42", Some("batch")),
            ("/slurm/uid_1/job_42", "42", None),
            ("/system.slice/slurmd.service", "7", Some("1")),
            ("/", "7", Some("1")),
        ] {
            let mut place = Place::of(cgroup);
            place.or_job_of(environment);
            assert_eq!((place.slurm_job.as_deref(), place.slurm_step.as_deref()), (Some(job), step), "{cgroup}");
        }
        let mut place = Place::of("/");
        place.or_job_of(|| None::<Vec<u8>>);
        assert_eq!(place, Place::default());
    }
}
