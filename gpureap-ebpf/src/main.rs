//! gpureap's kernel programs. Three probe sets share the bodies in this crate: thin entry points in [`kprobe`],
//! [`fentry`] and [`gate`]; [`life`] and [`sweep`] serve all three.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
// Every body works on addresses that the kernel handed in and on map values; that is what this crate is.
#![allow(clippy::missing_safety_doc, reason = "entry points are called by the kernel alone")]

mod atomic;
mod count;
mod emit;
mod fentry;
mod file;
mod fix;
mod gate;
mod globals;
mod kprobe;
mod life;
mod lineage;
mod mapping;
mod maps;
mod sweep;
mod table;
mod task;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier rejects a reachable endless loop, so a loaded program cannot panic.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
