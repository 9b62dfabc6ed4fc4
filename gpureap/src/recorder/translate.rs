//! From the kernel's records to events that people read. Pure.

use gpureap_common::{
    abi,
    event::{FileEvent, Header, ProcEvent, SignalEvent, origin},
    record::file_flag,
};

use crate::{
    bpf::ring,
    gpu::devices::Devices,
    history::{
        death::signal_name,
        event::{self, Held, HeldDevice, Sender, What},
        rows::{Key, Thread},
    },
    holders,
    model::{self, Holder},
    track::join,
};

fn key(header: &Header) -> Key {
    Key { pid: header.tgid, start_ns: header.start_ns }
}

/// What a record says; `None` for one that is only a reason to look.
pub(crate) fn translate(event: ring::Event, devices: &Devices) -> (u64, Option<What>) {
    match event {
        ring::Event::Open(file) | ring::Event::Gate(file) => {
            (file.header.time_ns, Some(What::Open(file_event(&file, devices, true))))
        }
        ring::Event::Free(file) => {
            let failed = file.flags & (file_flag::INSTALLED | file_flag::MAPPED | file_flag::SNAPSHOT) == 0;
            // One that failed is dropped by the task that tried; any other by whoever happens to be last.
            let event = event::FileEvent { failed, ..file_event(&file, devices, failed) };
            (file.header.time_ns, Some(What::Free(event)))
        }
        ring::Event::Last(file) => (file.header.time_ns, Some(What::Close(file_event(&file, devices, true)))),
        ring::Event::First(file) => (file.header.time_ns, None),
        ring::Event::Fork(process) => {
            let parent = Key { pid: process.parent_tgid, start_ns: process.parent_start_ns };
            let fork = event::Fork { key: key(&process.header), parent, comm: join::text(&process.comm) };
            (process.header.time_ns, Some(What::Fork(fork)))
        }
        ring::Event::Exec(process) => {
            let exec = event::Named { key: key(&process.header), comm: join::text(&process.comm) };
            (process.header.time_ns, Some(What::Exec(exec)))
        }
        ring::Event::Exit(process) => {
            let ProcEvent { header, exit_code: status, comm, .. } = process;
            let exit = event::Exit { key: key(&header), tid: header.tid, comm: join::text(&comm), status };
            (header.time_ns, Some(What::Exit(exit)))
        }
        ring::Event::Thread(process) => {
            let thread = Thread { tid: process.header.tid, name: join::text(&process.comm) };
            let event = event::ThreadEvent { key: key(&process.header), thread };
            (process.header.time_ns, Some(What::Thread(event)))
        }
        ring::Event::Oom(process) => {
            let ProcEvent { header, comm, .. } = process;
            let oom = event::Oom {
                key: (header.tgid != 0).then(|| key(&header)),
                tid: header.tid,
                comm: join::text(&comm),
                scope: None,
                cgroup: None,
                source: "tracepoint".to_owned(),
            };
            (header.time_ns, Some(What::Oom(oom)))
        }
        ring::Event::Signal(signal) => (signal.header.time_ns, Some(What::Signal(signal_event(&signal)))),
    }
}

fn file_event(file: &FileEvent, devices: &Devices, by_task: bool) -> event::FileEvent {
    let FileEvent { header, file: address, dev, slot, flags: _, pad: _, comm } = file;
    let node = devices.by_number(abi::major(*dev), abi::minor(*dev)).map_or(*slot, |device| device.slot);
    event::FileEvent {
        key: by_task.then(|| key(header)),
        tid: by_task.then_some(header.tid),
        comm: join::text(comm),
        node: devices.node(node),
        file: *address,
        failed: false,
    }
}

/// The sender's arguments and ancestors are not in the record.
fn signal_event(signal: &SignalEvent) -> event::Signal {
    let SignalEvent {
        header,
        sender_start_ns,
        sender_tgid,
        sender_tid,
        sender_uid,
        signal,
        code,
        origin,
        group: _,
        pad: _,
        thread,
        sender_thread,
        sender_comm,
    } = signal;
    let sender = Box::new(Sender {
        key: Key { pid: *sender_tgid, start_ns: *sender_start_ns },
        tid: *sender_tid,
        thread: join::text(sender_thread),
        comm: join::text(sender_comm),
        uid: *sender_uid,
        ..Sender::default()
    });
    let by_kernel = *origin == origin::KERNEL;
    let (sender, running) = if by_kernel { (None, Some(sender)) } else { (Some(sender), None) };
    event::Signal {
        key: key(header),
        tid: header.tid,
        thread: join::text(thread),
        signal: signal_name(*signal),
        code: (*code != 0).then_some(*code),
        sender,
        running,
    }
}

/// What a look found.
pub(super) fn held(holder: &Holder, devices: &Devices) -> Held {
    let Holder { key, usage, how: _, private_tids: _, inherited_from, from_snapshot } = holder;
    let list = usage.iter().filter(|(_, usage)| usage.is_held()).map(|(slot, usage)| HeldDevice {
        node: devices.node(*slot),
        fds: usage.fds,
        maps: usage.maps,
        role: devices.get(*slot).and_then(|device| holders::role(device, usage)),
        first_ns: usage.first_open_ns,
    });
    Held {
        key: (*key).into(),
        inherited_from: inherited_from.map(Key::from),
        from_snapshot: *from_snapshot,
        devices: list.collect(),
    }
}

pub(super) fn device(device: &model::Device) -> event::Device {
    let model::Device { slot: _, node, major, minor, kind, gpu, index, uuid, bdf, model } = device.clone();
    let node = node.display().to_string();
    event::Device { node, major, minor, kind, gpu, index, uuid, bdf, model }
}
