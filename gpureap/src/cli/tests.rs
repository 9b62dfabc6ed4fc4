use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("gpureap").chain(line.split_whitespace()))
}

#[test]
fn definitions_are_consistent() {
    command().debug_assert();
}

#[test]
fn every_help_has_an_example() {
    let mut all = command();
    all.build();
    for sub in all.get_subcommands_mut().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        let help = sub.render_long_help().to_string();
        assert!(help.contains("Example:\n  gpureap "), "{} has no example", sub.get_name());
    }
}

#[test]
fn examples_in_the_help_parse() {
    let mut all = command();
    all.build();
    let helps: Vec<String> =
        all.get_subcommands().filter_map(|sub| sub.get_after_help()).map(ToString::to_string).collect();
    for line in helps.iter().flat_map(|help| help.lines()).filter_map(|line| line.strip_prefix("  gpureap ")) {
        let line = line.split(" > ").next().unwrap();
        parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

#[test]
fn reap_defaults() {
    let args = |line: &str| match parse(line).unwrap().command {
        Command::Reap(args) => args,
        other => panic!("{other:?}"),
    };
    let plain = args("reap");
    assert_eq!((plain.matching(), plain.grace, plain.now), (Match::Any, Duration::from_secs(10), false));
    assert_eq!(args("reap --gpu 1").matching(), Match::Attached);
    assert_eq!(args("reap --gpu 1 --match any --timeout 1m30s").timeout, Duration::from_secs(90));
    let bare = args("reap --grace 5 --timeout 60");
    assert_eq!((bare.grace, bare.timeout), (Duration::from_secs(5), Duration::from_mins(1)));
    let both = args("reap --gpu 1 --gpu 2 --pid 7 --by index -y");
    assert_eq!((both.choosing.gpu.len(), both.choosing.pid, both.choosing.by), (2, vec![7], By::Index));
}

#[test]
fn a_fence_always_ends() {
    let args = |line: &str| match parse(line).unwrap().command {
        Command::Fence(args) => args,
        other => panic!("{other:?}"),
    };
    assert_eq!(args("fence").ttl, Duration::from_hours(1));
    assert_eq!(args("fence --ttl 7d").ttl, Duration::from_hours(168));
    assert_eq!(args("fence --gpu 0 --ttl 90").ttl, Duration::from_secs(90));
    let exempt = args("fence --exempt-pid 5 --exempt-pid 6 --exempt-cgroup a --exempt-cgroup /b");
    assert_eq!((exempt.exempt_pid, exempt.exempt_cgroup), (vec![5, 6], vec!["a".to_owned(), "/b".to_owned()]));
    assert!(args("fence --list --json").list);
}

#[test]
fn usage_errors_exit_2() {
    for line in [
        "reap --now --grace 3s",
        "reap --grace -1s",
        "reap --pid 0",
        "holders --sweep --source map",
        "fence --ttl 0",
        "fence --ttl 8d",
        "fence --ttl none",
        "fence --list --gpu 0",
        "fence --list --ttl 5m",
        "fence --exempt-pid 0",
        "unfence --ttl 5m",
        "holders --device kind=standin,major=4",
        "holders --backend lsm",
        "nonsense",
        "holders --user no-such-user-here",
        "holders --env KEY",
        "holders --comm a-name-that-is-too-long",
        "holders --cgroup /a/../b",
        "holders --slurm-job 1_2",
        "holders --older-than soon",
        "holders --older-than 1h --older-than 2h",
        "reap --unit a/b",
        "reap --tree-of 0",
        "-q -v holders",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn global_options_go_anywhere() {
    let device = "kind=standin,major=4,minor=20,node=/dev/tty20";
    let cli = parse(&format!("ps --json --device {device} --backend gate -vv")).unwrap();
    let Overrides { config, devices, backend, program } = cli.global.overrides();
    assert_eq!(program.as_deref(), Some(std::path::Path::new("/proc/self/exe")));
    assert_eq!((config, devices.len(), backend), (None, 1, Some(Backend::Gate)));
    assert_eq!(cli.global.verbose, 2);
    assert!(matches!(cli.command, Command::Holders(HoldersArgs { json: true, .. })));
}

#[test]
fn nothing_is_hidden() {
    let mut all = command();
    all.build();
    assert!(!all.get_subcommands().any(clap::Command::is_hide_set));
    assert!(parse("actor worker").is_err());
}

#[test]
fn an_empty_backend_is_unset_in_the_environment_alone() {
    let parser = BackendParser;
    let value = |source| parser.parse_ref_(&command(), None, OsStr::new(""), source);
    assert_eq!(value(ValueSource::EnvVariable).unwrap(), BackendChoice::Auto);
    assert_eq!(value(ValueSource::CommandLine).unwrap_err().exit_code(), 2);
    assert!(parse("holders --backend=").is_err());
    assert_eq!(parse("holders --backend=gate").unwrap().global.backend, BackendChoice::Gate);
    assert!(parser.possible_values().is_some_and(|values| values.count() == 4));
}

#[test]
fn the_library_begins_with_the_defaults_of_the_command_line() {
    let Command::Reap(args) = parse("reap").unwrap().command else { unreachable!() };
    assert_eq!(format!("{args:?}"), format!("{:?}", ReapArgs::default()));
    let Command::Holders(args) = parse("holders").unwrap().command else { unreachable!() };
    assert_eq!(format!("{args:?}"), format!("{:?}", HoldersArgs::default()));
    let Command::Report(args) = parse("report").unwrap().command else { unreachable!() };
    assert_eq!(format!("{args:?}"), format!("{:?}", ReportArgs::default()));
}
