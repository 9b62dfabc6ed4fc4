use super::{file::Size, *};
use crate::{error::exit_of, exit_code::Exit};

const EXAMPLE: &str = include_str!("../../../packaging/config.example.toml");

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("c.toml")).map_err(|failure| failure.message)
}

#[test]
fn example_shows_the_defaults() {
    assert_eq!(parse(EXAMPLE), Ok(Config::default()));
    // With every commented setting made live, the sections still are the defaults and the device is read.
    let live: String = EXAMPLE
        .lines()
        .map(|line| line.strip_prefix("#").filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
        .fold(String::new(), |text, line| text + line + "\n");
    let config = parse(&live).unwrap();
    assert_eq!(config.devices, [StandIn { major: 4, minor: 20, node: "/dev/tty20".into() }]);
    assert!(config.classes.has("gpu-broker") && config.classes.has("dcgm"));
    assert_eq!(config.metrics.listen, Some(([127, 0, 0, 1], 9840).into()));
    let otlp = config.otlp.as_ref().map(|otlp| (otlp.endpoint.to_string(), otlp.headers.len()));
    assert_eq!(otlp, Some(("http://127.0.0.1:4318/".to_owned(), 0)));
    let (metrics, otlp) = (Metrics::default(), None);
    assert_eq!(Config { devices: Vec::new(), classes: Rules::default(), metrics, otlp, ..config }, Config::default());
    // The shipped rules are in it too, to be read.
    let shipped: String = include_str!("../classify/rules.toml")
        .lines()
        .map(|line| format!("# {line}").trim_end().to_owned() + "\n")
        .collect();
    assert!(EXAMPLE.ends_with(&shipped), "copy classify/rules.toml, each line after `# `, to the end of the example");
    let keys = ["sweep_period", "loss_poll", "files", "holders", "tables", "procs", "lineage", "major", "node"];
    let nvml = ["enabled", "library", "timeout"];
    let rules = ["name", "class", "exe", "unit", "uid", "comm", "image", "container", "pod", "namespace"];
    let journal = ["enabled", "max_age", "max_size", "environment", "heartbeat", "memory_period"];
    for key in keys.into_iter().chain(nvml).chain(journal).chain(["listen", "endpoint", "headers"]).chain(rules) {
        assert!(live.lines().any(|line| line.starts_with(&format!("{key} ="))), "{key} is not documented");
    }
}

#[test]
fn mistakes_are_one_sentence_with_the_line() {
    let device = |major: i64, minor: i64, node: &str| {
        format!("[[device]]\nkind = \"standin\"\nmajor = {major}\nminor = {minor}\nnode = \"{node}\"\n")
    };
    let cases = [
        ("a = 1".to_owned(), "c.toml:1: unknown field `a`"),
        ("\n[daemon]\nsweep = 1".to_owned(), "c.toml:3: unknown field `sweep`"),
        ("[daemon]\nsweep_period = 30".to_owned(), "c.toml:2: invalid type: integer `30`"),
        ("[daemon]\nsweep_period = \"soon\"".to_owned(), "c.toml:2: `soon` is not a length of time"),
        ("[daemon]\nsweep_period = \"-3s\"".to_owned(), "c.toml:2: `-3s` is negative"),
        ("[daemon]\nloss_poll = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 10ms and 24h"),
        ("[maps]\nfiles = 3".to_owned(), "c.toml:2: 3 is not between 64 and"),
        ("[maps]\n\nfiles = \"3\"".to_owned(), "c.toml:3: invalid type: string \"3\""),
        ("[maps]\nfiles = 99999999999".to_owned(), "c.toml:2: 99999999999 is not between"),
        ("[nvml]\ntimeout = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 10ms and 24h"),
        ("[nvml]\nlibrary = \"lib/x.so\"".to_owned(), "c.toml:2: `lib/x.so` is neither a name nor an absolute"),
        ("[nvml]\nenabled = 1".to_owned(), "c.toml:2: invalid type: integer `1`"),
        ("[journal]\nmax_age = \"5m\"".to_owned(), "c.toml:2: `5m` is not between 1h and 3650d"),
        ("[journal]\nmax_age = 30".to_owned(), "c.toml:2: invalid type: integer `30`"),
        ("[journal]\nmax_size = \"big\"".to_owned(), "c.toml:2: `big` is not a size such as 1GiB"),
        ("[journal]\nmax_size = \"1GiBs\"".to_owned(), "c.toml:2: `1GiBs` is not a size"),
        ("[journal]\nmax_size = 1000".to_owned(), "c.toml:2: `1000` is not between 1MiB and"),
        ("[journal]\nmax_size = -1".to_owned(), "c.toml:2: `-1` is not a size"),
        ("[journal]\nmax_size = \"5KiB\"".to_owned(), "c.toml:2: `5KiB` is not between 1MiB and"),
        ("[journal]\nenvironment = [\"*\"]".to_owned(), "c.toml:2: `*` is not the name of a variable"),
        ("[journal]\nenvironment = [\"A*B\"]".to_owned(), "c.toml:2: `A*B` is not the name of a variable"),
        ("[journal]\nmemory_period = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 1s and 24h"),
        ("[metrics]\nlisten = 9840".to_owned(), "c.toml:2: invalid type: integer `9840`"),
        ("[metrics]\nlisten = \"9840\"".to_owned(), "c.toml:2: `9840` is not an address with a port such as"),
        (
            "[metrics]\nlisten = \"localhost:9840\"".to_owned(),
            "c.toml:2: `localhost:9840` is not an address with a port",
        ),
        ("[metrics]\nlisten = \"127.0.0.1:99999\"".to_owned(), "c.toml:2: `127.0.0.1:99999` is not an address"),
        ("[metrics]\nport = 1".to_owned(), "c.toml:2: unknown field `port`"),
        ("[otlp]\nendpoint = \"https://x\"".to_owned(), "c.toml:2: `https://x` wants TLS, which a collector"),
        ("[otlp]\nendpoint = \"x:4318\"".to_owned(), "c.toml:2: `x:4318` is not an address such as http://"),
        ("[otlp]\nendpoint = \"http://a:b@x:4318\"".to_owned(), "c.toml:2: `http://a:b@x:4318` is not an address such"),
        ("[otlp]\nheaders = { a = \"b\\u0007\" }".to_owned(), "c.toml:2: a header has a name and a value of printable"),
        ("[otlp]\nheaders = { \"a b\" = \"c\" }".to_owned(), "c.toml:1: [otlp] `a b` is not the name of a header"),
        ("x = [".to_owned(), "c.toml:1: "),
        ("[[device]]\nkind = \"gpu\"".to_owned(), "c.toml:2: unknown variant `gpu`, expected `standin`"),
        ("\n[[device]]\nkind = \"standin\"".to_owned(), "c.toml:2: missing field `major`"),
        (device(4, 1 << 20, "/dev/x"), "c.toml:1: minor 1048576 is not between"),
        (device(4, (1 << 20) - 1, "/dev/x"), "c.toml:1: minor 1048575 is not between"),
        (device(0, 1, "/dev/x"), "c.toml:1: major 0 is not between 1 and 4095"),
        (device(4, 1, "dev/x"), "c.toml:1: node dev/x is not an absolute path"),
        (device(4, -1, "/dev/x"), "c.toml:4: invalid value: integer `-1`"),
        (device(4, 1, "/dev/x") + &device(4, 1, "/dev/y"), "c.toml:6: device 4:1 is already /dev/x"),
        ("[[class]]\nname = \"a\"\nclass = \"system\"\ncomm = \"b\"".to_owned(), "c.toml:1: whoever runs a process"),
        ("[[class]]\nname = \"a\"\nclass = \"b\"".to_owned(), "c.toml:3: unknown variant `b`, expected one of `job`"),
    ];
    for (text, expected) in cases {
        let message = parse(&text).unwrap_err();
        assert!(message.starts_with(expected), "{text:?}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

/// What Rust calls things is nobody's business.
#[test]
fn mistakes_name_what_was_expected() {
    let rule = |condition: &str| format!("[[class]]\nname = \"a\"\nclass = \"system\"\n{condition}");
    for (text, expected) in [
        ("device = 3".to_owned(), "expected tables in double brackets"),
        ("[device]\nkind = \"standin\"".to_owned(), "c.toml:1: invalid type: map, expected tables in double brackets"),
        ("[class]".to_owned(), "expected tables in double brackets"),
        ("device = [3]".to_owned(), "expected a device: a table [[device]]"),
        ("[[device]]\nkind = 3".to_owned(), ""),
        ("daemon = 3".to_owned(), "expected a table [daemon]"),
        ("maps = \"x\"".to_owned(), "expected a table [maps]"),
        ("nvml = []".to_owned(), "expected a table [nvml]"),
        ("metrics = true".to_owned(), "expected a table [metrics]"),
        ("class = [3]".to_owned(), "expected a rule: a table [[class]]"),
        (rule("exe = 3"), "c.toml:4: `exe` must be a pattern or a list of patterns"),
        (rule("unit = []"), "c.toml:4: `unit` is a list without patterns"),
        (rule("image = [\"a\", \"\"]"), "c.toml:4: `image` has an empty pattern"),
        (rule("pod = \"[\""), "c.toml:4: `pod` has the pattern `[`: "),
        (rule("uid = []"), "a list of users that is empty fits nothing"),
        (rule("uid = \"\""), "a user's name is not empty"),
        (rule("uid = -1"), "`uid` must be a number"),
        (rule("uid = 4294967295"), "uid 4294967295 is nobody's"),
        (rule("exe = \"/x\"\ncomm = \"a-name-of-16-byt\""), "the kernel keeps 15 bytes"),
        (rule("exe = \"/x\"\ncomm = [\"b\", \"*a-name-of-16-byt*\"]"), "fits nothing"),
        (rule("unit = \"a/b.service\""), "the name of a unit has no `/`"),
    ] {
        let message = parse(&text).unwrap_err();
        assert!(message.contains(expected), "{text:?}: {message}");
        assert!(!message.contains("Raw") && !message.contains("struct"), "{text:?}: {message}");
    }
    for condition in ["comm = \"[a-zA-Z0-9_-]name-of-15*\"", "comm = \"\"", "comm = \"*a-name-of-15-by*\""] {
        parse(&rule(&format!("exe = \"/x\"\n{condition}"))).unwrap();
    }
}

#[test]
fn what_the_journal_keeps() {
    let text = "[journal]\nenabled = false\nmax_age = \"7d\"\nmax_size = \"500 MB\"\nheartbeat = \"1m\"\n\
                memory_period = \"30s\"\nenvironment = [\"RANK\", \"SLURM_*\"]";
    let journal = parse(text).unwrap().journal;
    let kept = ["RANK", "SLURM_JOB_ID", "SLURM_"].map(|name| journal.keeps(name));
    assert_eq!(kept, [true; 3]);
    let left_out = ["RANKS", "LOCAL_RANK", "SLURM", "xSLURM_JOB_ID", ""].map(|name| journal.keeps(name));
    assert_eq!(left_out, [false; 5]);
    let Journal { enabled, max_age, max_size, environment: _, heartbeat, memory_period } = journal;
    assert_eq!((enabled, max_age, max_size), (false, Duration::from_hours(7 * 24), 500_000_000));
    assert_eq!((heartbeat, memory_period), (Duration::from_mins(1), Some(Duration::from_secs(30))));
    for (text, bytes) in [("1GiB", 1 << 30), ("1048576", 1 << 20), ("2 TiB", 1 << 41), ("2000kB", 2_000_000)] {
        assert_eq!(text.parse::<Size>().map(|size| size.0), Ok(bytes), "{text}");
    }
    for name in ["SLURM_JOB_ID", "LOCAL_RANK", "MASTER_PORT", "KUBERNETES_SERVICE_HOST"] {
        assert!(Journal::default().keeps(name), "{name}");
    }
    assert!(!Journal::default().keeps("AWS_SECRET_ACCESS_KEY"));
}

#[test]
fn command_line_devices_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    fs::write(&file, "[[device]]\nkind = \"standin\"\nmajor = 4\nminor = 20\nnode = \"/dev/tty20\"\n").unwrap();
    let load = |device: &str| {
        let overrides = Overrides {
            config: Some(file.clone()),
            devices: vec![device.parse().unwrap()],
            backend: Some(Backend::Gate),
            program: None,
        };
        Config::load(Paths::default(), overrides)
    };
    let config = load("kind=standin,major=4,minor=21,node=/dev/tty21").unwrap();
    assert_eq!(config.devices.len(), 2);
    assert_eq!(config.backend, Some(Backend::Gate));
    assert_eq!(load("kind=standin,node=/dev/tty20,minor=20,major=4").unwrap().devices.len(), 1);
    let error = load("kind=standin,major=4,minor=20,node=/dev/other").unwrap_err();
    assert_eq!(exit_of(&error), Exit::Usage);
    assert_eq!(format!("{error:#}"), "--device: device 4:20 is already /dev/tty20");
}

#[test]
fn stand_ins_on_the_command_line() {
    for (text, expected) in [
        ("major=4,minor=1,node=/x", "kind=standin is the only kind"),
        ("kind=standin,major=4,node=/x", "minor is missing"),
        ("kind=standin,major=a,minor=1,node=/x", "major `a` is not a number"),
        ("kind=standin,major=1,major=2", "`major` is given twice"),
        ("kind=standin,colour=red", "unknown key `colour`"),
        ("standin", "`standin` is not KEY=VALUE"),
    ] {
        let message = text.parse::<StandIn>().unwrap_err();
        assert!(message.starts_with(expected), "{text}: {message}");
    }
}

#[test]
fn a_missing_file_matters_only_when_named() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.toml");
    let paths = Paths::from_env(|name| (name == "GPUREAP_CONFIG").then(|| absent.clone().into()));
    assert_eq!(Config::load(paths.clone(), Overrides::default()).unwrap().maps, Maps::default());
    let error = Config::load(paths, Overrides { config: Some(absent), ..Overrides::default() }).unwrap_err();
    assert_eq!(exit_of(&error), Exit::Usage);
}

#[test]
fn lengths_of_time() {
    for (text, expected) in [
        ("5", Some(Duration::from_secs(5))),
        ("0", Some(Duration::ZERO)),
        ("0.25", Some(Duration::from_millis(250))),
        ("250ms", Some(Duration::from_millis(250))),
        ("1m 30s", Some(Duration::from_secs(90))),
        ("12h", Some(Duration::from_hours(12))),
        ("3d", Some(Duration::from_hours(72))),
        ("1 day", Some(Duration::from_hours(24))),
        ("2days 1h", Some(Duration::from_hours(49))),
        ("1d12h", Some(Duration::from_hours(36))),
        ("0d", Some(Duration::ZERO)),
        ("1w", Some(Duration::from_hours(7 * 24))),
        ("2 weeks 1d", Some(Duration::from_hours(15 * 24))),
        ("d", None),
        ("1decade", None),
        ("-1d", None),
        ("1d-1h", None),
        ("3d3d", None),
        ("1h2d", None),
        ("99999999999d", None),
        ("1d18446744073709549568", None),
        ("3d 18446744073709549568s", None),
        ("", None),
        (".", None),
        ("-5", None),
        ("-3s", None),
        ("1e3", None),
        ("inf", None),
        ("99999999999999999999999", None),
        ("soon", None),
    ] {
        assert_eq!(duration(text).ok(), expected, "{text:?}");
    }
}

#[test]
fn paths_follow_the_environment() {
    let paths = Paths::from_env(|name| (name == "GPUREAP_PROC").then(|| "/p".into()));
    assert_eq!((paths.proc.to_str(), paths.sys.to_str()), (Some("/p"), Some("/sys")));
    assert_eq!(Paths::from_env(|_| Some(OsString::new())), Paths::default());
}

#[test]
fn root_believes_no_file_that_others_could_have_written() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    fs::write(&path, "[daemon]\nsocket = false\n").unwrap();
    let load = || Config::load(Paths { config: path.clone(), ..Paths::default() }, Overrides::default());
    assert!(!load().unwrap().daemon.socket);
    let said = || {
        let error = load().unwrap_err();
        assert_eq!(exit_of(&error), Exit::Usage);
        format!("{error:#}")
    };
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(said().ends_with("config.toml may be written by others than its owner"), "{}", said());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    chown(&path, Some(65534), None).unwrap();
    assert!(said().ends_with("config.toml belongs to user 65534, not to root"), "{}", said());
    chown(&path, Some(0), None).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(said().ends_with("may be written by others than its owner"), "{}", said());
}
