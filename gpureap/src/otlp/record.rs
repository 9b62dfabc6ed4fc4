//! From rows of the journal to log records of OpenTelemetry. Names are those of its semantic conventions, where there is one;
//! the others begin with `gpureap.`.

use opentelemetry_proto::tonic::{
    collector::logs::v1::ExportLogsServiceRequest,
    common::v1::{AnyValue, ArrayValue, InstrumentationScope, KeyValue, any_value::Value},
    logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber},
    resource::v1::Resource,
};

use crate::{
    clock,
    history::{
        event::{Event, Lost, Oom, Reap, What, Xid},
        incident::{rank, rank_set, slurm_job},
        rows::{Boot, Cause, Death, HoldRow, Key, ProcessRow},
    },
    journal::export::{Item, Sent},
    out::words::word,
};

/// Whose telemetry it is.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// `/etc/machine-id`, as the conventions have it.
    pub host_id: Option<String>,
}

fn value(value: Value) -> AnyValue {
    AnyValue { value: Some(value) }
}

/// Attributes that have a value.
#[derive(Default)]
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn add(&mut self, key: &str, found: Value) {
        self.0.push(KeyValue { key: key.to_owned(), value: Some(value(found)), ..KeyValue::default() });
    }

    fn text(&mut self, key: &str, text: impl Into<String>) {
        let text = text.into();
        if !text.is_empty() {
            self.add(key, Value::StringValue(text));
        }
    }

    fn maybe(&mut self, key: &str, text: Option<&String>) {
        if let Some(text) = text {
            self.text(key, text);
        }
    }

    fn number(&mut self, key: &str, number: impl TryInto<i64>) {
        if let Ok(number) = number.try_into() {
            self.add(key, Value::IntValue(number));
        }
    }

    fn list(&mut self, key: &str, list: &[String]) {
        if !list.is_empty() {
            let values = list.iter().map(|text| value(Value::StringValue(text.clone()))).collect();
            self.add(key, Value::ArrayValue(ArrayValue { values }));
        }
    }

    fn process(&mut self, boot: &Boot, row: &ProcessRow) {
        self.number("process.pid", row.key.pid);
        self.text("process.executable.name", row.comm.as_str());
        self.maybe("process.executable.path", row.exe.as_ref());
        self.maybe("process.command", row.argv.first());
        self.list("process.command_args", &row.argv);
        self.maybe("process.owner", row.user.as_ref());
        if let Some(uid) = row.uid {
            self.number("process.user.id", uid);
        }
        self.text("process.creation.time", clock::wall(boot.wall_offset_ns, row.key.start_ns).to_string());
        if let Some(parent) = row.parent {
            self.number("process.parent_pid", parent.pid);
        }
        let place = &row.place;
        self.maybe("process.linux.cgroup", place.cgroup.as_ref());
        self.maybe("container.id", place.container.as_ref());
        self.maybe("container.name", place.container_name.as_ref());
        self.maybe("container.image.name", place.image.as_ref());
        self.maybe("k8s.pod.uid", place.pod.as_ref());
        self.maybe("k8s.pod.name", place.pod_name.as_ref());
        self.maybe("k8s.namespace.name", place.pod_namespace.as_ref());
        self.maybe("gpureap.unit", place.unit.as_ref());
        self.text("gpureap.slurm.job.id", slurm_job(row).unwrap_or_default());
        self.maybe("gpureap.slurm.step.id", place.slurm_step.as_ref());
        self.text("gpureap.rank_set", rank_set(row).unwrap_or_default());
        if let Some(rank) = rank(row) {
            self.number("gpureap.rank", rank);
        }
        self.maybe("gpureap.class", row.class.as_ref());
    }
}

/// One record, and what makes it the same one when it comes twice.
fn record(
    boot: &Boot,
    boot_ns: u64,
    name: &str,
    severity: SeverityNumber,
    body: String,
    identity: &str,
    mut attributes: Attributes,
) -> LogRecord {
    let unix = |at: jiff::Timestamp| u64::try_from(at.as_nanosecond()).unwrap_or(0);
    attributes.text("log.record.uid", format!("{}/{name}/{identity}", boot.boot_id));
    LogRecord {
        time_unix_nano: unix(clock::wall(boot.wall_offset_ns, boot_ns)),
        observed_time_unix_nano: unix(jiff::Timestamp::now()),
        severity_number: severity as i32,
        severity_text: severity.as_str_name().trim_start_matches("SEVERITY_NUMBER_").to_owned(),
        body: Some(value(Value::StringValue(body))),
        attributes: attributes.0,
        event_name: name.to_owned(),
        ..LogRecord::default()
    }
}

fn identity(key: Key) -> String {
    format!("{}-{}", key.pid, key.start_ns)
}

fn death(boot: &Boot, row: &ProcessRow, death: &Death) -> LogRecord {
    let mut attributes = Attributes::default();
    attributes.process(boot, row);
    attributes.text("gpureap.cause", word(&death.cause));
    if let Some(code) = death.code {
        attributes.number("process.exit.code", code);
    }
    attributes.maybe("gpureap.signal", death.signal.as_ref());
    if let Some(sender) = &death.sender {
        attributes.number("gpureap.sender.pid", sender.key.pid);
        attributes.text("gpureap.sender.executable.name", sender.comm.as_str());
        attributes.list("gpureap.sender.command_args", &sender.argv);
        attributes.number("gpureap.sender.user.id", sender.uid);
    }
    attributes.list("gpureap.evidence", &death.evidence);
    let severity = match death.cause {
        Cause::Exited if death.code.unwrap_or(0) == 0 => SeverityNumber::Info,
        Cause::Reaped => SeverityNumber::Info,
        Cause::Exited | Cause::KilledBy | Cause::Unknown => SeverityNumber::Warn,
        Cause::OomKill | Cause::Fault | Cause::HostDown => SeverityNumber::Error,
    };
    let because = death.evidence.first().map(|because| format!(": {because}")).unwrap_or_default();
    let body = format!("{} (pid {}) died ({}){because}", row.comm, row.key.pid, word(&death.cause));
    let at = death.boot_ns.or(row.exit_ns).unwrap_or(row.key.start_ns);
    record(boot, at, "gpureap.death", severity, body, &identity(row.key), attributes)
}

fn hold(boot: &Boot, hold: &HoldRow, process: Option<&ProcessRow>) -> LogRecord {
    let HoldRow { key, node, opened_ns, released_ns, ended, origin, fds, maps, role, inherited_from: _ } = hold;
    let released_ns = released_ns.unwrap_or(*opened_ns);
    let mut attributes = Attributes::default();
    match process {
        Some(row) => attributes.process(boot, row),
        None => attributes.number("process.pid", key.pid),
    }
    attributes.text("gpureap.node", node.as_str());
    attributes.text("gpureap.hold.begin", clock::wall(boot.wall_offset_ns, *opened_ns).to_string());
    let seconds = released_ns.saturating_sub(*opened_ns) as f64 / 1e9;
    attributes.add("gpureap.hold.duration", Value::DoubleValue(seconds));
    attributes.text("gpureap.hold.ended", ended.map(|ended| word(&ended)).unwrap_or_default());
    attributes.text("gpureap.hold.origin", word(origin));
    attributes.text("gpureap.hold.role", role.map(|role| word(&role)).unwrap_or_default());
    attributes.number("gpureap.hold.fds", *fds);
    attributes.number("gpureap.hold.maps", *maps);
    let who = process.map_or("a process", |row| row.comm.as_str());
    let body = format!("{who} (pid {}) held {node} for {seconds:.3} s", key.pid);
    let identity = format!("{}/{node}/{opened_ns}", identity(*key));
    record(boot, released_ns, "gpureap.hold", SeverityNumber::Info, body, &identity, attributes)
}

fn event(boot: &Boot, event: &Event, process: Option<&ProcessRow>) -> Option<LogRecord> {
    let mut attributes = Attributes::default();
    if let Some(row) = process {
        attributes.process(boot, row);
    }
    let at = event.boot_ns;
    let (name, severity, body, who) = match &event.what {
        What::Reap(Reap { key, signal, unit, cgroup, by_pid, by_uid }) => {
            if process.is_none() {
                attributes.number("process.pid", key.pid);
            }
            attributes.maybe("gpureap.signal", signal.as_ref());
            attributes.maybe("gpureap.reap.unit", unit.as_ref());
            attributes.maybe("gpureap.reap.cgroup", cgroup.as_ref());
            attributes.number("gpureap.sender.pid", *by_pid);
            attributes.number("gpureap.sender.user.id", *by_uid);
            let act = signal.clone().or_else(|| Some(format!("an order to stop {}", unit.as_ref()?)));
            let body = format!("gpureap sent {} to pid {}", act.as_deref().unwrap_or("a signal"), key.pid);
            let who = format!("{}/{}", identity(*key), signal.as_deref().unwrap_or("stop"));
            ("gpureap.reap", SeverityNumber::Info, body, who)
        }
        What::Oom(Oom { key, tid, comm, scope, cgroup, source }) => {
            attributes.text("gpureap.oom.scope", scope.map(|scope| word(&scope)).unwrap_or_default());
            attributes.maybe("gpureap.oom.cgroup", cgroup.as_ref());
            let body = format!("the kernel chose {comm} (pid {tid}) because memory ran out");
            let who = key.map_or_else(|| tid.to_string(), identity);
            ("gpureap.oom", SeverityNumber::Error, body, format!("{who}/{source}"))
        }
        What::Xid(Xid { bdf, node, xid, pid, name, message, source: _ }) => {
            attributes.number("gpureap.xid", *xid);
            attributes.text("gpureap.pci_address", bdf.as_str());
            attributes.maybe("gpureap.node", node.as_ref());
            attributes.maybe("gpureap.xid.process", name.as_ref());
            if let Some(pid) = pid {
                attributes.number("process.pid", *pid);
            }
            ("gpureap.xid", SeverityNumber::Error, format!("Xid {xid} on {bdf}: {message}"), format!("{bdf}/{xid}"))
        }
        What::Lost(Lost { events, at, note }) => {
            attributes.number("gpureap.lost", *events);
            attributes.text("gpureap.lost.at", at.as_str());
            ("gpureap.lost", SeverityNumber::Warn, note.clone(), at.clone())
        }
        What::Start(start) => {
            attributes.text("gpureap.probe_set", word(&start.backend));
            let body = format!("gpureap {} begins to record", start.version);
            ("gpureap.start", SeverityNumber::Info, body, start.daemon_pid.to_string())
        }
        What::Stop => ("gpureap.stop", SeverityNumber::Info, "gpureap ends".to_owned(), String::new()),
        _ => return None,
    };
    Some(record(boot, at, name, severity, body, &format!("{who}/{at}"), attributes))
}

/// A request of some items. One resource for each boot: host names and ids of an earlier one may be others.
pub fn request(items: &[Item], origin: &Origin) -> ExportLogsServiceRequest {
    let mut resource_logs: Vec<ResourceLogs> = Vec::new();
    let mut last: Option<&str> = None;
    for Item { boot, what, process } in items {
        let log = match what {
            Sent::Death(row) => row.death.as_ref().map(|found| death(boot, row, found)),
            Sent::Hold(found, process) => Some(hold(boot, found, process.as_deref())),
            Sent::Event(found) => event(boot, found, process.as_deref()),
        };
        let Some(log) = log else { continue };
        if last != Some(boot.boot_id.as_str()) {
            last = Some(&boot.boot_id);
            resource_logs.push(resource(boot, origin));
        }
        if let Some(scope) = resource_logs.last_mut().and_then(|logs| logs.scope_logs.last_mut()) {
            scope.log_records.push(log);
        }
    }
    ExportLogsServiceRequest { resource_logs }
}

fn resource(boot: &Boot, origin: &Origin) -> ResourceLogs {
    let version = env!("CARGO_PKG_VERSION");
    let mut attributes = Attributes::default();
    attributes.text("service.name", "gpureap");
    attributes.text("service.version", version);
    attributes.text("host.name", boot.host.as_str());
    attributes.maybe("host.id", origin.host_id.as_ref());
    attributes.text("os.type", "linux");
    attributes.text("os.version", boot.kernel.as_str());
    attributes.text("gpureap.boot.id", boot.boot_id.as_str());
    let scope = InstrumentationScope { name: "gpureap".to_owned(), version: version.to_owned(), ..Default::default() };
    ResourceLogs {
        resource: Some(Resource { attributes: attributes.0, ..Resource::default() }),
        scope_logs: vec![ScopeLogs { scope: Some(scope), ..ScopeLogs::default() }],
        ..ResourceLogs::default()
    }
}

#[cfg(test)]
mod tests;
