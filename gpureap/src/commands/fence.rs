//! `gpureap fence` and `gpureap unfence`.

use std::collections::BTreeSet;

use gpureap_common::record::Device as Traced;

use crate::{
    bpf::{
        eyes,
        fence::{
            Exemptions, Standing,
            pinned::{self, Changed},
        },
    },
    choose::require_process,
    cli::{FenceArgs, FencedGpus, UnfenceArgs},
    clock,
    config::Config,
    error::{Failure, NO_DEVICE},
    exit_code::Exit,
    fence::{
        cgroup::Cgroups,
        report::{Action, FenceReport, HostNames, Scene, build},
        text,
    },
    gpu::{
        devices::{Devices, discover},
        nvml::mig::AskMig,
    },
    host::Host,
    kernel::rights,
    model::{Device, ProcKey, Slot},
    out,
    process::Facts,
};

pub fn run(args: &FenceArgs, config: &Config) -> anyhow::Result<Exit> {
    require_root()?;
    let report = if args.list { list(config)? } else { raise(args, config)? };
    print(&report, args.json)
}

pub fn unfence(args: &UnfenceArgs, config: &Config) -> anyhow::Result<Exit> {
    require_root()?;
    print(&lower(args, config)?, args.json)
}

fn print(report: &FenceReport, json: bool) -> anyhow::Result<Exit> {
    if json {
        out::json::print(report)?;
    } else {
        out::raw(text::fence(report).as_bytes())?;
    }
    Ok(Exit::Done)
}

fn require_root() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::not_permitted("a fence needs root: it closes devices for the whole host"))
}

fn raise(args: &FenceArgs, config: &Config) -> anyhow::Result<FenceReport> {
    let FenceArgs { gpus: FencedGpus { gpu, by }, ttl, exempt_pid, exempt_cgroup, list: _, json: _ } = args;
    rights::require_host_namespaces()?;
    let devices = devices(config)?;
    crate::eyes::require_configured(config, &devices)?;
    if devices.is_empty() {
        return Err(nothing_to_fence().into());
    }
    let slots = devices.select_all_with(&config.paths, gpu, *by, &AskMig(&config.nvml))?;
    if slots.is_empty() {
        return Err(nothing_to_fence().into());
    }
    let exempt = exemptions(config, exempt_pid, exempt_cgroup)?;
    let deadline_ns = clock::boottime_ns().saturating_add(clock::nanos(*ttl));
    let changed = pinned::raise(config, &devices, &slots, deadline_ns, &exempt)?;
    let chosen = numbers(&devices, &slots);
    Ok(report(Action::Fence, config, &devices, &chosen, changed))
}

fn nothing_to_fence() -> Failure {
    Failure::unsupported(format!("there is nothing to fence: this host has {NO_DEVICE}"))
}

fn list(config: &Config) -> anyhow::Result<FenceReport> {
    let standing = pinned::read(config)?.unwrap_or_default();
    let changed = Changed { standing, ..Changed::default() };
    Ok(report(Action::List, config, &devices(config)?, &BTreeSet::new(), changed))
}

fn lower(args: &UnfenceArgs, config: &Config) -> anyhow::Result<FenceReport> {
    let UnfenceArgs { gpus: FencedGpus { gpu, by }, json: _ } = args;
    let devices = devices(config)?;
    if gpu.is_empty() {
        let changed = pinned::lower(config, None)?;
        let all = changed.standing.table.iter().map(|(number, _)| *number).collect();
        return Ok(report(Action::Unfence, config, &devices, &all, changed));
    }
    // What is wrong with the fence is said below.
    let table = pinned::read(config).unwrap_or_default().unwrap_or_default().table;
    let mig = AskMig(&config.nvml);
    let chosen = named(&devices, &table, gpu, &|devices, value| devices.select(&config.paths, value, *by, &mig))?;
    let devices = devices.with_all_of(&table);
    let mut changed = pinned::lower(config, Some(&chosen))?;
    for device in devices.list().iter().filter(|device| chosen.contains(&device.number())) {
        if !changed.before.contains(&device.number()) {
            changed.notes.push(format!("{} was not fenced", device.node.display()));
        }
    }
    Ok(report(Action::Unfence, config, &devices, &chosen, changed))
}

/// As the running tracer has them, so that a number means the same GPU here as for `holders`.
fn devices(config: &Config) -> anyhow::Result<Devices> {
    let own = discover(&config.paths, &config.devices)?;
    Ok(match eyes::from_pins(config, &own) {
        Ok(Ok(eyes)) => eyes.devices().clone(),
        Ok(Err(_)) | Err(_) => own,
    })
}

/// Finds one `--gpu` value among some devices.
type Select<'a> = &'a dyn Fn(&Devices, &str) -> Result<BTreeSet<Slot>, Failure>;

/// Device numbers of what is to be opened. A value means what it means for `gpureap fence`; a fenced device that is no
/// longer configured can be named too.
fn named(
    own: &Devices,
    table: &[(u32, Traced)],
    values: &[String],
    select: Select<'_>,
) -> Result<BTreeSet<u32>, Failure> {
    let all = own.with_all_of(table);
    if all.is_empty() {
        return Err(Failure::no_device(None));
    }
    let mut chosen = BTreeSet::new();
    for value in values {
        let found = if value == "all" { Err(Failure::usage("")) } else { select(own, value) };
        chosen.extend(match found {
            Ok(slots) => numbers(own, &slots),
            Err(failure) if failure.exit == Exit::Usage => numbers(&all, &select(&all, value)?),
            Err(failure) => return Err(failure),
        });
    }
    Ok(chosen)
}

fn numbers(devices: &Devices, slots: &BTreeSet<Slot>) -> BTreeSet<u32> {
    slots.iter().filter_map(|slot| devices.get(*slot)).map(Device::number).collect()
}

fn exemptions(config: &Config, pids: &[u32], cgroups: &[String]) -> anyhow::Result<Exemptions> {
    let mut exempt = Exemptions::default();
    for pid in pids {
        require_process("--exempt-pid", *pid, &config.paths.proc)?;
        let facts = Facts::read_any(&config.paths.proc, *pid)
            .filter(|facts| facts.state != 'Z' || facts.thread_count > 1)
            .ok_or_else(|| Failure::usage(format!("--exempt-pid: there is no process {pid}")))?;
        exempt.processes.insert(ProcKey::new(facts.tgid, facts.start_ns));
    }
    for text in cgroups {
        let (id, _) = Cgroups::find(&config.paths.proc)?.resolve(text)?;
        exempt.cgroups.insert(id);
    }
    Ok(exempt)
}

fn report(action: Action, config: &Config, devices: &Devices, chosen: &BTreeSet<u32>, changed: Changed) -> FenceReport {
    let Changed { standing, before, notes } = changed;
    let Standing { table, .. } = &standing;
    let devices = devices.with_all_of(table);
    let scene = Scene { action, standing: &standing, devices: &devices, chosen, before: &before, notes };
    build(scene, &Host::read(&config.paths.proc), &HostNames::new(config))
}

#[cfg(test)]
mod tests {
    use gpureap_common::abi::dev;

    use super::*;
    use crate::{
        config::{Paths, StandIn},
        gpu::{
            devices::stand_ins_alone,
            select::{By, NoMig},
        },
        model::DeviceKind,
    };

    fn stand_ins(minors: &[u32]) -> Devices {
        let list: Vec<StandIn> =
            minors.iter().map(|minor| StandIn::new(4, *minor, format!("/dev/tty{minor}").into()).unwrap()).collect();
        stand_ins_alone(&list).unwrap()
    }

    #[test]
    fn a_number_means_the_same_device_for_fence_and_unfence() {
        let paths = Paths { dev: "/nonexistent".into(), ..Paths::default() };
        // The fence had its devices under a configuration of another order, with one that is gone.
        let table: Vec<(u32, Traced)> = [(0, 22), (1, 21), (2, 20)]
            .map(|(slot, minor)| (dev(4, minor), Traced { slot, kind: DeviceKind::Standin as u32 }))
            .into();
        let own = stand_ins(&[20, 21]);
        let named = |own: &Devices, table: &[(u32, Traced)], value: &str| {
            let select = |devices: &Devices, value: &str| devices.select(&paths, value, By::Minor, &NoMig);
            named(own, table, &[value.to_owned()], &select).map_err(|failure| failure.exit)
        };
        for (value, expected) in [
            ("0", Ok(vec![20])),
            ("1", Ok(vec![21])),
            ("/dev/tty21", Ok(vec![21])),
            ("/dev/char/4:22", Ok(vec![22])),
            ("all", Ok(vec![20, 21, 22])),
            ("/dev/tty9", Err(Exit::Usage)),
            ("MIG-1", Err(Exit::Unsupported)),
        ] {
            let expected = expected.map(|minors: Vec<u32>| minors.into_iter().map(|minor| dev(4, minor)).collect());
            assert_eq!(named(&own, &table, value), expected, "{value}");
        }
        assert_eq!(named(&stand_ins(&[]), &[], "0"), Err(Exit::Unsupported));
    }
}
