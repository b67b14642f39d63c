//! The archive the kernel unpacks at boot: busybox, a handful of modules, and a short script.
//!
//! It does the least that gets the machine's own root mounted; everything else is done by
//! [`super::init`], which is this very program, started from that root.

use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Makes the initramfs: loads `modules` in their order, mounts the shared root, starts `init` from it.
pub(crate) fn build(modules: &[impl AsRef<Path>], init: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "modules", "lower", "upper", "root"] {
        archive.directory(directory);
    }
    archive.file("bin/busybox", 0o755, &read(busybox()?)?);
    for (index, module) in modules.iter().enumerate() {
        archive.file(
            &format!("modules/{index:03}.ko"),
            0o644,
            &read(module.as_ref())?,
        );
    }
    archive.file("init.path", 0o644, init.as_os_str().as_bytes());
    archive.file("init", 0o755, SCRIPT.as_bytes());
    Ok(archive.finish())
}

/// `exec` keeps process 1; a failed step shows on the console, which the host's error message quotes.
const SCRIPT: &str = r#"#!/bin/busybox sh
b=/bin/busybox
must() { "$@" || { echo "lab: failed: $*"; $b dmesg | $b tail -n 20; $b poweroff -f; }; }
must $b mount -t devtmpfs dev /dev
must $b mount -t proc proc /proc
for module in /modules/*.ko; do must $b insmod "$module"; done
must $b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 root /lower
must $b mount -t tmpfs -o mode=755,size=75% tmpfs /upper
$b mkdir /upper/data /upper/work
must $b mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root
read -r init < /init.path
exec $b switch_root /root "$init" lab-init
"#;

pub(crate) fn busybox() -> Result<&'static Path> {
    let found = ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .map(Path::new)
        .find(|p| p.exists());
    let Some(path) = found else {
        bail!("no busybox: install the package busybox-static")
    };
    if names_interpreter(&read(path)?) {
        bail!(
            "{} is not static: install the package busybox-static",
            path.display()
        );
    }
    Ok(path)
}

/// Whether an ELF file asks for a dynamic loader, which the initramfs does not have.
fn names_interpreter(elf: &[u8]) -> bool {
    let head = &elf[..elf.len().min(4096)];
    head.windows(7).any(|window| window == b"/ld-lin")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// A cpio archive in the `newc` format, the one the kernel reads.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.entry(name, 0o100_000 | mode, data);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.inode += 1;
        let (links, length, name_length) = (1, data.len(), name.len() + 1);
        let (user, group, time, device, checksum) = (0, 0, 0, 0, 0);
        let inode = self.inode;
        let header = format!(
            "070701{inode:08x}{mode:08x}{user:08x}{group:08x}{links:08x}{time:08x}{length:08x}\
             {device:08x}{device:08x}{device:08x}{device:08x}{name_length:08x}{checksum:08x}"
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_closed_by_the_trailer() {
        let mut archive = Archive::default();
        archive.file("a", 0o644, b"hello");
        let bytes = archive.finish();

        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(
            &bytes[6 + 8 * 6..6 + 8 * 7],
            b"00000005",
            "the file's length"
        );
        assert_eq!(&bytes[110..112], b"a\0");
        assert_eq!(&bytes[112..117], b"hello");
        assert_eq!(&bytes[120..126], b"070701");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }

    #[test]
    fn a_dynamic_program_is_told_from_a_static_one() {
        assert!(names_interpreter(
            b"\x7fELF....../lib64/ld-linux-x86-64.so.2"
        ));
        assert!(!names_interpreter(b"\x7fELF......"));
    }
}
