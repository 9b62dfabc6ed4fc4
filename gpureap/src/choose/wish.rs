//! Values of the filters as people write them. What can never fit anything is refused here.

use std::{fmt, str::FromStr};

use crate::process::users;

/// The kernel keeps 15 bytes of a process's name (`TASK_COMM_LEN` is 16 with the zero).
pub const COMM_MAX: usize = 15;

/// Fewer digits of an id fit too many containers by chance.
pub const ID_MIN: usize = 4;

/// The number that stands for no user (`(uid_t) -1`).
pub const NO_USER: u32 = u32::MAX;

/// A user by name or number.
pub fn user(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(NO_USER) => return Err(format!("{text} is nobody's number")),
        Ok(uid) => return Ok(uid),
        Err(_) => {}
    }
    users::uid_of(text).ok_or_else(|| format!("no such user: {text}"))
}

/// The name of a process, as long as the kernel keeps it.
pub fn comm(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("a process's name is not empty".to_owned());
    }
    if text.len() > COMM_MAX {
        let mut end = COMM_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        return Err(format!("the kernel keeps {COMM_MAX} bytes of a process's name; say `{}`", &text[..end]));
    }
    Ok(text.to_owned())
}

/// A container by id, by the beginning of one, or by name.
pub fn container(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a container's id or name is not empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// `123`, or `123.0` and `123.batch` for one step, or `any`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlurmJob {
    Any,
    One { job: String, step: Option<String> },
}

impl FromStr for SlurmJob {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "any" {
            return Ok(Self::Any);
        }
        let (job, step) = text.split_once('.').map_or((text, None), |(job, step)| (job, Some(step)));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if job.contains(['_', '+']) {
            return Err(format!(
                "`{job}` is a part of an array or of a heterogeneous job: say its own number, which `squeue -o %A` shows"
            ));
        }
        if !digits(job) || step.is_some_and(|step| step.is_empty() || step.contains('/')) {
            return Err(format!(
                "`{text}` is not the number of a Slurm job, such as 123, or of a step, such as 123.0, and not `any`"
            ));
        }
        Ok(Self::One { job: job.to_owned(), step: step.map(str::to_owned) })
    }
}

/// A systemd unit, with `.service` for one without a suffix, as systemctl reads it.
pub fn unit(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains('/') {
        return Err(format!("`{text}` is not the name of a unit"));
    }
    let has_suffix = [".service", ".scope", ".slice"].iter().any(|suffix| text.ends_with(suffix));
    Ok(if has_suffix { text.to_owned() } else { format!("{text}.service") })
}

/// A group's path, which has no `..`: whether it is below a mount is seen later.
pub fn cgroup(text: &str) -> Result<String, String> {
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if text.is_empty() || parts.contains(&"..") {
        return Err(format!("`{text}` is not the path of a cgroup"));
    }
    Ok(format!("/{}", parts.join("/")))
}

/// `KEY=VAL`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variable {
    pub key: String,
    pub value: String,
}

impl FromStr for Variable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self { key: key.to_owned(), value: value.to_owned() }),
            _ => Err(format!("`{text}` is not KEY=VAL")),
        }
    }
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        assert_eq!((user("0"), user("root"), user("4242424")), (Ok(0), Ok(0), Ok(4_242_424)));
        assert_eq!(user("nobody-of-this-name"), Err("no such user: nobody-of-this-name".to_owned()));
        assert!(user("4294967295").is_err() && user("4294967294").is_ok());
        assert_eq!(user(""), Err("no such user: ".to_owned()));
        assert_eq!(comm("pt_data_worker_"), Ok("pt_data_worker_".to_owned()));
        assert!(comm("pt_data_worker_1").unwrap_err().ends_with("say `pt_data_worker_`"));
        assert!(comm("äääääääää").unwrap_err().ends_with("say `äääääää`"));
        assert!(comm("").is_err() && container("").is_err());
        for (text, expected) in [
            ("train", Some("train.service")),
            ("train.service", Some("train.service")),
            ("session-3.scope", Some("session-3.scope")),
            ("user-1000.slice", Some("user-1000.slice")),
            ("gpu@0", Some("gpu@0.service")),
            ("a.b", Some("a.b.service")),
            ("", None),
            ("a/b", None),
        ] {
            assert_eq!(unit(text).ok().as_deref(), expected, "{text}");
        }
        for (text, expected) in [
            ("/system.slice", Some("/system.slice")),
            ("system.slice/a.service/", Some("/system.slice/a.service")),
            ("/a//./b", Some("/a/b")),
            ("/", Some("/")),
            ("/a/../b", None),
            ("", None),
        ] {
            assert_eq!(cgroup(text).ok().as_deref(), expected, "{text}");
        }
        for (text, expected) in [
            ("123", Some(("123", None))),
            ("123.0", Some(("123", Some("0")))),
            ("123.batch", Some(("123", Some("batch")))),
            ("123_4", None),
            ("123+1", None),
            ("123.", None),
            (".0", None),
            ("any", Some(("any", None))),
            ("any.0", None),
            ("job_1", None),
            ("", None),
        ] {
            let job = text.parse::<SlurmJob>().ok();
            let job = job.as_ref().map(|job| match job {
                SlurmJob::Any => ("any", None),
                SlurmJob::One { job, step } => (job.as_str(), step.as_deref()),
            });
            assert_eq!(job, expected, "{text}");
        }
        for (text, expected) in
            [("A=1", Some("A=1")), ("A=", Some("A=")), ("A=b=c", Some("A=b=c")), ("A", None), ("=1", None)]
        {
            let variable = text.parse::<Variable>().ok();
            assert_eq!(variable.map(|variable| variable.to_string()).as_deref(), expected, "{text}");
        }
    }
}
