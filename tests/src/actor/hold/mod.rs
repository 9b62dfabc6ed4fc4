pub(super) fn kinds() -> impl Iterator<Item = &'static str> { [].into_iter() }
pub(super) fn run(_: &str, _: &[&str]) {}
