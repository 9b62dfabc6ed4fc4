//! Samples of device memory by process, where `[journal] memory_period` asks for them. NVML is asked by the usual child, in
//! a thread of its own: it may take seconds, and hang.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::sync::mpsc;

use super::Input;
use crate::{
    config,
    gpu::{
        devices::Devices,
        nvml::{Gpu, NvmlChild, NvmlTrouble, Snapshot},
    },
    history::event::{Memory, ProcessMemory, What},
    out::complaint::Complaint,
};

/// How long a child may take to end.
const PATIENCE: Duration = Duration::from_secs(1);

/// `held`: whether anybody holds anything, for an idle GPU is left alone.
pub(super) fn sample(
    config: &config::Config,
    period: Duration,
    devices: Devices,
    held: Arc<AtomicBool>,
    out: mpsc::WeakSender<Input>,
) -> std::io::Result<()> {
    let nvml = config.nvml.clone();
    thread::Builder::new().name("memory".to_owned()).spawn(move || {
        let mut complaint = Complaint::none();
        loop {
            thread::sleep(period);
            if !held.load(Ordering::Relaxed) {
                continue;
            }
            match ask(&nvml) {
                Ok(snapshot) => {
                    complaint.end();
                    for memory in events(&snapshot, &devices) {
                        let Some(out) = out.upgrade() else { return };
                        if out.blocking_send(Input::What(None, Box::new(What::Memory(memory)))).is_err() {
                            return;
                        }
                    }
                }
                Err(trouble) => {
                    let reason = trouble.to_string();
                    if complaint.is_news(&reason) {
                        tracing::warn!("no samples of device memory: {reason}");
                    }
                }
            }
            if out.upgrade().is_none() {
                return;
            }
        }
    })?;
    Ok(())
}

fn ask(nvml: &config::Nvml) -> Result<Snapshot, NvmlTrouble> {
    let mut child = NvmlChild::spawn(nvml)?;
    let answer = child.ask(nvml.timeout);
    child.close(PATIENCE);
    answer
}

/// One for each GPU that is in the table of devices.
fn events(snapshot: &Snapshot, devices: &Devices) -> Vec<Memory> {
    let event = |gpu: &Gpu| {
        let device = devices.gpus().find(|device| device.gpu.is_some() && device.gpu == gpu.minor)?;
        let memory = gpu.memory?;
        let processes =
            gpu.processes.iter().flatten().map(|process| ProcessMemory { pid: process.pid, bytes: process.used });
        Some(Memory {
            node: device.node.display().to_string(),
            used_bytes: memory.used,
            total_bytes: memory.total,
            processes: processes.collect(),
        })
    };
    snapshot.gpus.iter().filter_map(event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::StandIn,
        gpu::{
            devices,
            nvml::{self, Context, GpuProcess},
        },
    };

    #[test]
    fn a_sample_of_each_gpu_that_is_traced() {
        let stand_ins = [StandIn::new(4, 40, "/dev/tty40".into()).unwrap()];
        let devices = devices::stand_ins_alone(&stand_ins).unwrap();
        let gpu = |minor| Gpu {
            minor: Some(minor),
            memory: Some(nvml::Memory { total: 100, used: 40, reserved: None }),
            processes: Some(vec![GpuProcess { pid: 7, used: Some(30), context: Context::Compute, gi: None, ci: None }]),
            ..Gpu::default()
        };
        let snapshot = Snapshot { driver: None, gpus: vec![gpu(0), gpu(1), Gpu { memory: None, ..gpu(0) }] };
        let processes = vec![ProcessMemory { pid: 7, bytes: Some(30) }];
        let expected = Memory { node: "/dev/tty40".to_owned(), used_bytes: 40, total_bytes: 100, processes };
        assert_eq!(events(&snapshot, &devices), [expected]);
    }
}
