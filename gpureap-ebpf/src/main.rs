//! gpureap's kernel programs. Three probe sets share the bodies in this crate: thin entry points in [`kprobe`],
//! [`fentry`] and [`gate`]; [`life`] and [`sweep`] serve all three. [`fence`] belongs to none.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![allow(
    clippy::inline_always,
    reason = "a body belongs to its entry point: a call costs a frame of the 512 bytes of stack"
)]
#![allow(clippy::needless_pass_by_value, reason = "aya's macros hand the context over by value")]

mod atomic;
mod count;
mod emit;
mod fence;
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
mod signal;
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
