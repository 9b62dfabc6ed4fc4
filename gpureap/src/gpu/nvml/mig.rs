//! MIG devices by UUID, for `--gpu`: only NVML knows them.

use crate::{
    config::Nvml,
    gpu::{
        nvml::{NvmlChild, NvmlTrouble},
        select::{MigInstance, MigSource},
    },
};

/// Asks a child of its own, when it is asked.
#[derive(Clone, Copy, Debug)]
pub struct AskMig<'a>(pub &'a Nvml);

impl MigSource for AskMig<'_> {
    fn resolve(&self, uuid: &str) -> Result<Option<MigInstance>, String> {
        let because = |trouble: NvmlTrouble| format!("NVML, and {trouble}");
        let mut child = NvmlChild::spawn(self.0).map_err(because)?;
        let snapshot = child.ask(self.0.timeout).map_err(because)?;
        match snapshot.mig(uuid).as_slice() {
            [] => Ok(None),
            [place] => match (place.parent_minor, place.gi, place.ci) {
                (Some(gpu), Some(gi), Some(ci)) => Ok(Some(MigInstance { gpu, gi, ci })),
                _ => Err(format!("NVML, which does not tell where {uuid} is")),
            },
            several => {
                let names: Vec<&str> = several.iter().map(|place| place.uuid.as_str()).collect();
                Err(format!("a longer UUID: it may be {}", names.join(" or ")))
            }
        }
    }
}
