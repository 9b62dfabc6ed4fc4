//! Views over the kernel's maps and iterators.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
};

use anyhow::Context as _;
use gpureap_common::{
    abi,
    counter::{self, GATE_OPENS},
    record::{Lineage, lineage_flag},
    sweep::SweepRecord,
};

use super::{
    handles::{Handles, State},
    load,
    resync::{self, Base},
    sys::Tasks,
};
use crate::{
    clock,
    config::Config,
    gpu::devices::Devices,
    model::{Ancestor, Backend, Eyes, Holder, How, LineageSource, ProcKey, Slot, Source, View},
    track::join::{self, MapState},
};

/// More candidates than this are cheaper to find by one full sweep than one by one.
const CANDIDATES: usize = 256;

/// Reads pinned maps, or a one-shot snapshot when nothing is attached.
#[derive(Debug)]
pub struct KernelEyes {
    handles: Handles,
    devices: Devices,
    /// `None`: nothing is attached, every look is a sweep.
    backend: Option<Backend>,
    proc: PathBuf,
    notes: Vec<String>,
    lineage_swept: OnceCell<()>,
    /// When the tracer was attached; a set of pins keeps it.
    attached_ns: OnceCell<u64>,
    /// See [`KernelEyes::one`].
    skips_threads: bool,
}

/// Major and minor of a kernel release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

impl KernelEyes {
    pub fn new(handles: Handles, devices: Devices, backend: Option<Backend>, config: &Config) -> Self {
        Self {
            handles,
            devices,
            backend,
            proc: config.paths.proc.clone(),
            notes: Vec::new(),
            lineage_swept: OnceCell::new(),
            attached_ns: OnceCell::new(),
            skips_threads: release(&rustix::system::uname().release().to_string_lossy())
                .is_none_or(|version| version < (6, 7)),
        }
    }

    #[must_use]
    pub fn with_notes(mut self, notes: Vec<String>) -> Self {
        self.notes.extend(notes);
        self
    }

    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    pub const fn handles(&self) -> &Handles {
        &self.handles
    }

    fn slot_of(&self, dev: u32) -> Option<Slot> {
        self.devices.by_number(abi::major(dev), abi::minor(dev)).map(|device| device.slot)
    }

    /// Brings the maps to what a sweep sees.
    pub fn resync(&self) -> anyhow::Result<resync::Outcome> {
        resync::resync(&self.handles, &|dev| self.slot_of(dev))
    }

    /// Gives the kernel a device table; devices that it knows already keep their slots.
    pub fn set_devices(&mut self, devices: &Devices) -> anyhow::Result<()> {
        let table = self.handles.maps.devices()?;
        self.devices = devices.with_slots_of(&table);
        load::set_devices(&self.handles.maps, &self.devices)
    }

    /// Notes what one process has mapped, for the set that has no hook on mmap: its children will be asked about it.
    pub fn observe(&self, tgid: u32) -> anyhow::Result<()> {
        let records = self.one(tgid)?;
        for (key, slots) in join::mapped(&records, &|dev| self.slot_of(dev)) {
            for slot in slots {
                resync::mark_mapped(&self.handles, key, slot)?;
            }
        }
        Ok(())
    }

    /// What one process holds, with what is remembered of it.
    pub fn holder(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        let mut holders = join::from_sweep(&self.one(tgid)?, &|dev| self.slot_of(dev));
        if self.backend.is_some()
            && let Some(process) = self.handles.process(tgid)?
        {
            join::remember(&mut holders, &[(tgid, process)].into_iter().collect());
        }
        Ok(holders.into_values().next())
    }

    /// What can never be seen by this source.
    fn cannot_see(&self) -> BTreeSet<How> {
        match self.backend {
            Some(Backend::Kprobe | Backend::Fentry) => BTreeSet::new(),
            Some(Backend::Gate) | None => BTreeSet::from([How::InFlight, How::IoUring]),
        }
    }

    fn records(&self, tgids: &BTreeSet<u32>) -> io::Result<Vec<SweepRecord>> {
        if tgids.len() > CANDIDATES {
            return self.handles.sweep(Tasks::All);
        }
        let mut records = Vec::new();
        for tgid in tgids {
            records.extend(self.one(*tgid)?);
        }
        Ok(records)
    }

    /// One process. Kernels before 6.1 cannot restrict an iterator; those before 6.7 leave threads out
    /// (`task_group_seq_get_next` compared the files of the thread before the one it was about to show), so there each
    /// thread is asked for by itself.
    fn one(&self, tgid: u32) -> io::Result<Vec<SweepRecord>> {
        let mut records = match self.handles.sweep(Tasks::Process(tgid)) {
            Ok(records) => records,
            // No such process any more: nothing is held.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(Vec::new()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let mut records = self.handles.sweep(Tasks::All)?;
                records.retain(|record| record.tgid == tgid);
                return Ok(records);
            }
            Err(error) => return Err(error),
        };
        if self.skips_threads {
            for entry in fs::read_dir(self.proc.join(tgid.to_string()).join("task")).into_iter().flatten().flatten() {
                let tid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
                let Some(tid) = tid.filter(|tid| *tid != tgid) else { continue };
                match self.handles.sweep(Tasks::Thread(tid)) {
                    Ok(more) => records.extend(more.into_iter().filter(|record| record.tgid == tgid)),
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(records)
    }

    fn assemble(
        &self,
        source: Source,
        holders: BTreeMap<ProcKey, Holder>,
        open_files: BTreeMap<Slot, u32>,
    ) -> anyhow::Result<View> {
        let attached = self.backend.is_some();
        let (lost, healed, swept) = if attached {
            let healed = self.handles.maps.state(State::Healed)?;
            (self.handles.losses()?, healed, self.handles.maps.state(State::Swept)?)
        } else {
            (0, 0, clock::boottime_ns())
        };
        let mut notes = self.notes.clone();
        let mut complete = true;
        if attached {
            for (index, name) in [
                (counter::FILES_FULL, "files"),
                (counter::TABLES_FULL, "tables"),
                (counter::HOLDERS_FULL, "holders"),
                (counter::PROCS_FULL, "procs"),
            ] {
                let count = self.handles.maps.counter(index)?;
                if count > 0 {
                    complete = false;
                    notes.push(format!(
                        "the map `{name}` was full {count} times: raise maps.{name} in the configuration and restart the daemon"
                    ));
                }
            }
            if self.cannot_see().is_empty() {
                let since = self.handles.maps.meta()?.attached_ns;
                let ago = clock::boottime_ns().saturating_sub(since) / 1_000_000_000;
                notes.push(format!(
                    "files that were in flight or in an io_uring table before the tracer was attached ({ago} s ago) are not seen"
                ));
            }
            if lost > healed {
                notes.push(format!(
                    "{} events were lost since the last resync: this view is from a full sweep",
                    lost - healed
                ));
            }
        }
        Ok(View {
            source,
            backend: self.backend,
            complete,
            cannot_see: self.cannot_see(),
            lost_events: lost,
            swept_ns: (swept != 0).then_some(swept),
            open_files,
            holders: holders.into_values().collect(),
            orphans: Vec::new(),
            notes,
        })
    }

    /// Sets that count in the kernel.
    fn counted_view(&self) -> anyhow::Result<View> {
        let unhealed = self.handles.losses()? > self.handles.maps.state(State::Healed)?;
        if unhealed || self.handles.maps.meta()?.snapshot_ns == 0 {
            // The daemon does the same on its timer; without one the reader does.
            self.resync()?;
            if self.handles.losses()? > self.handles.maps.state(State::Healed)? {
                return self.swept_view(Source::Map);
            }
        }
        let mut state = resync::read_maps(&self.handles).context("read the pinned maps")?;
        // What was open on a device that is in the table no more, as after a reload of the driver, is of another device.
        state.retain_slots(&|slot| self.devices.get(slot).is_some());
        let records = if join::needs_sweep(&state) {
            self.handles.sweep(Tasks::All)?
        } else {
            self.records(&join::to_verify(&state))?
        };
        let mut holders = join::from_map(&state, &records, &|dev| self.slot_of(dev));
        join::remember(&mut holders, &state.procs);
        let mut open_files = BTreeMap::new();
        for file in state.files.values() {
            *open_files.entry(file.slot).or_default() += 1;
        }
        let mut view = self.assemble(Source::Map, holders, open_files)?;
        view.orphans = join::orphans(&state.files, &records, clock::boottime_ns(), &|key| self.uses_uring(key));
        Ok(view)
    }

    /// The gate: verifies the candidates, and sweeps when a file may be hidden from them.
    fn gate_view(&self) -> anyhow::Result<View> {
        let base = Base::last(&self.handles)?;
        let healed = self.handles.losses()? <= self.handles.maps.state(State::Healed)?;
        let procs = self.handles.procs()?;
        if let Some(base) = base
            && healed
            && procs.len() <= CANDIDATES
        {
            let tgids = procs.iter().map(|(tgid, _)| *tgid).collect();
            let records = self.records(&tgids)?;
            let open_files = join::files_in_sweep(&records, &|dev| self.slot_of(dev));
            let files: u32 = open_files.values().sum();
            // Read after the candidates: an open in between makes the sum not fit, and the read sweeps.
            let opens = self.handles.maps.counter(GATE_OPENS)?;
            if u64::from(files) == base.files + (opens - base.opens)
                && !join::has_unseen_references(&records)
                && !join::may_be_shared(&records)
            {
                let mut holders = join::from_sweep(&records, &|dev| self.slot_of(dev));
                join::remember(&mut holders, &procs.into_iter().collect());
                return self.assemble(Source::Map, holders, open_files);
            }
        }
        if !healed {
            self.resync()?;
        }
        self.gate_sweep()
    }

    /// A full sweep that the next reads of the gate are measured against: they need none of their own.
    fn gate_sweep(&self) -> anyhow::Result<View> {
        let (records, _) = resync::refresh_candidates(&self.handles, &|dev| self.slot_of(dev))?;
        let mut holders = join::from_sweep(&records, &|dev| self.slot_of(dev));
        join::remember(&mut holders, &self.handles.procs()?.into_iter().collect());
        let open_files = join::files_in_sweep(&records, &|dev| self.slot_of(dev));
        self.assemble(Source::Map, holders, open_files)
    }

    fn swept_view(&self, source: Source) -> anyhow::Result<View> {
        let records = self.handles.sweep(Tasks::All).context("sweep")?;
        let slot_of = |dev| self.slot_of(dev);
        let mut holders = join::from_sweep(&records, &slot_of);
        let mut open_files = join::files_in_sweep(&records, &slot_of);
        let counts = self.backend.is_some_and(Backend::counts);
        let mut state = MapState::default();
        if self.backend.is_some() {
            state.procs = self.handles.procs()?.into_iter().collect();
            join::remember(&mut holders, &state.procs);
        }
        if counts {
            state.files = self.handles.files()?.into_iter().collect();
            open_files.clear();
            for file in state.files.values() {
                *open_files.entry(file.slot).or_default() += 1;
            }
        }
        let mut view = self.assemble(source, holders, open_files)?;
        if counts {
            view.orphans = join::orphans(&state.files, &records, clock::boottime_ns(), &|key| self.uses_uring(key));
        }
        view.swept_ns = Some(clock::boottime_ns());
        Ok(view)
    }

    /// Whether a living process has an io_uring, where a file can live without a descriptor.
    fn uses_uring(&self, key: ProcKey) -> bool {
        let Ok(entries) = fs::read_dir(self.proc.join(key.tgid.to_string()).join("fd")) else { return false };
        entries.flatten().any(|entry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy() == "anon_inode:[io_uring]")
        })
    }
}

impl Eyes for KernelEyes {
    fn view(&self) -> anyhow::Result<View> {
        match self.backend {
            None => self.swept_view(Source::Snapshot),
            Some(Backend::Gate) => self.gate_view(),
            Some(Backend::Kprobe | Backend::Fentry) => self.counted_view(),
        }
    }

    fn sweep(&self) -> anyhow::Result<View> {
        match self.backend {
            None => self.swept_view(Source::Snapshot),
            Some(Backend::Gate) => self.gate_sweep(),
            Some(Backend::Kprobe | Backend::Fentry) => self.swept_view(Source::Map),
        }
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        let records = self.one(tgid)?;
        Ok(join::from_sweep(&records, &|dev| self.slot_of(dev)).into_values().next())
    }

    fn lineage(&self) -> &dyn LineageSource {
        self
    }
}

impl LineageSource for KernelEyes {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        if self.backend.is_none() {
            // Nothing was recorded: the living ancestors are what there is.
            self.lineage_swept.get_or_init(|| self.handles.sweep_lineage().unwrap_or_default());
        }
        let record = self.handles.maps.ancestor(key).ok()??;
        let (argv, argv_cut) = self.arguments(&record);
        Some(Ancestor {
            key,
            parent: (record.parent_tgid != 0).then(|| ProcKey::new(record.parent_tgid, record.parent_start_ns)),
            comm: join::text(&record.comm),
            argv,
            argv_cut,
            uid: record.uid,
            cgroup_id: record.cgroup_id,
            exit: (record.exit_ns != 0).then_some((record.exit_ns, record.exit_code)),
            renewed: self.is_renewed(key, &record),
        })
    }

    fn forgotten(&self) -> Option<u64> {
        self.backend?;
        self.handles.maps.forgotten().ok()
    }
}

impl KernelEyes {
    /// A process that began before the tracer's eyes has a record from a sweep only if the one of its fork was dropped.
    fn is_renewed(&self, key: ProcKey, record: &Lineage) -> bool {
        self.backend.is_some()
            && record.flags & lineage_flag::SNAPSHOT != 0
            && self.attached_ns().is_some_and(|attached_ns| key.start_ns > attached_ns)
    }

    fn attached_ns(&self) -> Option<u64> {
        if self.attached_ns.get().is_none() {
            self.attached_ns.set(self.handles.maps.meta().ok()?.attached_ns).ok();
        }
        self.attached_ns.get().copied()
    }

    /// A process that has not called exec runs its parent's program under its parent's arguments.
    fn arguments(&self, record: &Lineage) -> (Vec<String>, bool) {
        let mut record = *record;
        for _ in 0..32 {
            if record.exec_ns != 0 {
                let length = (record.args_len as usize).min(record.args.len());
                return (join::arguments(&record.args[..length]), record.flags & lineage_flag::ARGS_CUT != 0);
            }
            let parent = ProcKey::new(record.parent_tgid, record.parent_start_ns);
            match self.handles.maps.ancestor(parent) {
                Ok(Some(next)) if record.flags & lineage_flag::SNAPSHOT == 0 => record = next,
                _ => break,
            }
        }
        (Vec::new(), false)
    }
}

/// Opens the pinned maps of a running tracer, if there is one that this build can read.
pub fn from_pins(config: &Config, devices: &Devices) -> anyhow::Result<Result<KernelEyes, Vec<String>>> {
    let root = &config.paths.pin;
    let (sets, _) = super::pins::list(root).map_err(|error| super::denied_or(root, error))?;
    if !sets.is_empty() {
        crate::trust::place(root).map_err(super::distrusted)?;
    }
    let mut notes = Vec::new();
    for set in sets {
        match Handles::from_pins(&set.dir) {
            Ok(handles) => {
                let number = handles.maps.meta()?.backend;
                let backend = load::from_number(number).unwrap_or(set.backend);
                // The kernel's table says what is traced and under which slot.
                let traced = devices.traced(&handles.maps.devices()?);
                return Ok(Ok(KernelEyes::new(handles, traced, Some(backend), config)));
            }
            Err(error) => notes.push(error.to_string()),
        }
    }
    Ok(Err(notes))
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn kernel_releases_are_compared_as_numbers() {
        assert_eq!(release("6.1.0-57-cloud-amd64"), Some((6, 1)));
        assert_eq!(release("6.12.118+deb13"), Some((6, 12)));
        assert!(release("6.12").unwrap() > release("6.7").unwrap());
        assert_eq!(release("unknown"), None);
    }
}
