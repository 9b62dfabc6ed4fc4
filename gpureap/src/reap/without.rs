//! A look that leaves out gpureap's own processes: NVML opens every GPU, and the child that asks it would be a holder of
//! all of them.

use std::collections::BTreeSet;

use crate::model::{Eyes, Holder, LineageSource, View};

/// [`Eyes`] that do not see some processes. They are this process, or children that were not collected yet, so their
/// pids are nobody else's.
pub struct Without<'a> {
    pub eyes: &'a dyn Eyes,
    pub pids: BTreeSet<u32>,
}

impl Without<'_> {
    fn strip(&self, mut view: View) -> View {
        let (helpers, holders) =
            view.holders.into_iter().partition(|holder: &Holder| self.pids.contains(&holder.key.tgid));
        view.holders = holders;
        let helpers: Vec<Holder> = helpers;
        for (slot, usage) in helpers.iter().flat_map(|holder| &holder.usage) {
            if let Some(files) = view.open_files.get_mut(slot) {
                *files = files.saturating_sub(usage.fds);
            }
        }
        view.open_files.retain(|_, files| *files > 0);
        view
    }
}

impl Eyes for Without<'_> {
    fn view(&self) -> anyhow::Result<View> {
        self.eyes.view().map(|view| self.strip(view))
    }

    fn sweep(&self) -> anyhow::Result<View> {
        self.eyes.sweep().map(|view| self.strip(view))
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        self.eyes.look_at(tgid).map(|holder| holder.filter(|_| !self.pids.contains(&tgid)))
    }

    fn lineage(&self) -> &dyn LineageSource {
        self.eyes.lineage()
    }
}
