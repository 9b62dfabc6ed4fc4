//! What a process that runs for months keeps in memory.

use std::fs;

/// Before there are threads. Each has little to allocate, and an area of its own would never be given back.
pub fn one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number in the allocator.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives back what only a start needs: the heap in which the kernel's types were read, and the program's own pages, most
/// of which are of code that does not run again. Those that are needed come back from the page cache.
pub fn forget_the_start() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it gives back pages without allocations.
    unsafe {
        libc::malloc_trim(0);
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for (begin, end) in maps.lines().filter_map(code) {
        // SAFETY: private pages of a file that are never written are read from it again when they are used.
        unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(begin), end - begin, libc::MADV_DONTNEED) };
    }
}

/// The addresses of a mapping of code. Other parts of a program were changed when it was loaded.
fn code(line: &str) -> Option<(usize, usize)> {
    let mut words = line.split_ascii_whitespace();
    let (addresses, rights) = (words.next()?, words.next()?);
    let inode = words.nth(2)?;
    let (begin, end) = addresses.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    (rights == "r-xp" && inode != "0").then_some((address(begin)?, address(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_forgotten() {
        let line = "7f00-7f80 r-xp 00001000 fe:00 1234   /usr/bin/gpureap";
        assert_eq!(code(line), Some((0x7f00, 0x7f80)));
        for line in [
            "7f00-7f80 r--p 00001000 fe:00 1234   /usr/bin/gpureap",
            "7f00-7f80 rwxp 00001000 fe:00 1234   /usr/bin/gpureap",
            "7f00-7f80 r-xp 00000000 00:00 0      [vdso]",
            "",
        ] {
            assert_eq!(code(line), None, "{line}");
        }
    }

    #[test]
    fn a_process_that_forgets_goes_on() {
        forget_the_start();
        assert!(fs::read_to_string("/proc/self/maps").is_ok());
    }
}
