//! The memory flag: what tutorials poll, and how it goes wrong.

use std::time::{Duration, Instant};

use rdma_msg::{Endpoint, SharedRegion};

use crate::cli::Result;

/// Where the flag lies, behind the data; data and flag are within the same 128 aligned bytes.
pub const FLAG: usize = 120;

// region: flag
/// Waits until the word at [`FLAG`] has the value `expected`; whether it got it in time.
///
/// The deadline is all that ends this when the flag never comes.
pub fn await_flag(region: &SharedRegion, expected: u64, deadline: Instant) -> Result<bool> {
    while region.load_u64(FLAG)? != expected {
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::hint::spin_loop();
    }
    Ok(true)
}
// endregion

/// One round as the receiver sees it: did the flag come, and what data lies there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Whether the loop ended by the flag, and not by its deadline.
    pub flag: bool,
    /// The first bytes of the region, as text.
    pub data: String,
}

/// The peer's write for one round: data in front, and the flag at the end unless it forgets it.
///
/// # Errors
/// If the write could not be posted. Whether it *failed* is the peer's to know, and not told here.
pub fn write(
    writer: &Endpoint,
    region: rdma_msg::RemoteRegion,
    data: [u8; 8],
    flag: Option<u64>,
) -> Result<()> {
    let len = if flag.is_some() { FLAG + 8 } else { FLAG };
    let mut buf = writer.alloc(len)?;
    buf.fill(0);
    buf[..8].copy_from_slice(&data);
    if let Some(flag) = flag {
        buf[FLAG..].copy_from_slice(&flag.to_ne_bytes());
    }
    let _ = writer.write(buf, region.slice(0..len as u64)?)?.wait(); // the receiver hears nothing of it
    Ok(())
}

/// What the receiver believes after `patience`.
///
/// # Errors
/// If the region is too small.
pub fn look(region: &SharedRegion, expected: u64, patience: Duration) -> Result<Seen> {
    let flag = await_flag(region, expected, Instant::now() + patience)?;
    let mut data = [0; 8];
    region.read_at(0, &mut data)?;
    let data = String::from_utf8_lossy(&data).into_owned();
    Ok(Seen { flag, data })
}
