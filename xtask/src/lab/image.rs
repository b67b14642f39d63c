//! The kernel's image, unpacked beforehand.
//!
//! A bzImage unpacks itself when it starts, which takes an emulated processor three seconds. QEMU can also
//! start the kernel proper, if that has the entry point of the PVH boot protocol.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;

/// The kernel proper out of a bzImage, `None` if it is not of a kind that QEMU can start directly.
pub(crate) fn unpacked(image: &[u8]) -> Result<Option<Vec<u8>>> {
    let Some(payload) = payload(image) else {
        return Ok(None);
    };
    let Some(tool) = tool_for(payload) else {
        return Ok(None);
    };
    let Ok(kernel) = filter(tool, payload) else {
        return Ok(None);
    };
    Ok(has_pvh_entry(&kernel).then_some(kernel))
}

/// The compressed kernel, found by the fields of the boot protocol's header (version 2.08 on).
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    // 0 stands for 4, from before the field existed.
    let setup_sectors = match image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    // Behind the compressed data stands its length when unpacked.
    let length = word(0x24c)?.checked_sub(4)?;
    image.get(start..start.checked_add(length)?)
}

fn tool_for(payload: &[u8]) -> Option<&'static str> {
    match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("xz"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("zstd"),
        [0x1f, 0x8b, ..] => Some("gzip"),
        _ => None,
    }
}

/// Whether the ELF notes hold the entry point: owner "Xen", type 18 (XEN_ELFNOTE_PHYS32_ENTRY).
fn has_pvh_entry(kernel: &[u8]) -> bool {
    const OWNER_LENGTH: [u8; 4] = 4_u32.to_le_bytes();
    const TYPE_AND_OWNER: &[u8] = b"\x12\0\0\0Xen\0";
    kernel
        .windows(16)
        .step_by(4)
        .any(|note| note[..4] == OWNER_LENGTH && &note[8..] == TYPE_AND_OWNER)
}

fn filter(tool: &str, input: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new(tool)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {tool}"))?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let mut output = Vec::new();
    thread::scope(|scope| {
        scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
        stdout
            .map(|mut stdout| stdout.read_to_end(&mut output))
            .transpose()
    })?;
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "{tool} -dc failed");
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_by_the_boot_header() {
        let mut image = vec![0; 1024 + 16 + 12];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248] = 16;
        image[0x24c] = 12;
        image[1024 + 16..1024 + 24].copy_from_slice(b"payload!");
        assert_eq!(payload(&image), Some(&b"payload!"[..]));
    }

    #[test]
    fn an_image_of_another_kind_has_no_payload() {
        assert_eq!(payload(b"\x7fELF"), None);
        assert_eq!(payload(&[0; 4096]), None);
    }

    #[test]
    fn the_pvh_entry_is_recognised_by_its_note() {
        let note = b"\0\0\0\0\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0\x01\x02\x03\x04";
        assert!(has_pvh_entry(note));
        assert!(!has_pvh_entry(&note[..16]));
        assert!(!has_pvh_entry(b"\x04\0\0\0\x08\0\0\0\x13\0\0\0Xen\0"));
    }
}
