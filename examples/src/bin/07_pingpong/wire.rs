//! What the two sides tell each other beside the data: short messages, each with a tag in front.
//!
//! ```text
//! client                                          server
//! Setup, and its region's descriptor        ──►
//!                                           ◄──   Ready, and its region's descriptor
//!                                           ◄──   Go            once for each iteration, and at the end:
//! the iteration's data  ◄──► (see the op)               "I checked the last one, and am ready for the next"
//!                                           ◄──   Wrong, text   instead: my copy of the data differs
//! ```

use clap::ValueEnum;
use rdma_examples::cli::Result;
use rdma_msg::RemoteRegion;

/// What is timed; see the table in `main.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    /// A message each way.
    Send,
    /// A write with immediate each way.
    Write,
    /// A read by the client.
    Read,
}

/// One run: a size and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) op: Op,
    pub(crate) size: u32,
    pub(crate) iterations: u64,
    /// In this iteration the side that makes the data makes one byte wrong.
    pub(crate) corrupt_at: Option<u64>,
}

/// A control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    Setup(Setup, RemoteRegion),
    Ready(RemoteRegion),
    Go,
    Wrong(String),
}

const SETUP: u8 = 1;
const READY: u8 = 2;
const GO: u8 = 3;
const WRONG: u8 = 4;
const NEVER: u64 = u64::MAX;
const REGION: usize = 20;

impl Setup {
    const LEN: usize = 21;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.op as u8;
        bytes[1..5].copy_from_slice(&self.size.to_be_bytes());
        bytes[5..13].copy_from_slice(&self.iterations.to_be_bytes());
        bytes[13..].copy_from_slice(&self.corrupt_at.unwrap_or(NEVER).to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Setup> {
        let (op, rest) = bytes.split_first()?;
        let op = Op::value_variants().get(usize::from(*op))?;
        let (size, rest) = rest.split_first_chunk()?;
        let (iterations, rest) = rest.split_first_chunk()?;
        let corrupt_at = u64::from_be_bytes(*rest.first_chunk()?);
        Some(Setup {
            op: *op,
            size: u32::from_be_bytes(*size),
            iterations: u64::from_be_bytes(*iterations),
            corrupt_at: (corrupt_at != NEVER).then_some(corrupt_at),
        })
    }
}

impl Control {
    /// The message as it travels.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Control::Setup(setup, region) => {
                [&[SETUP][..], &setup.to_bytes(), &region.to_bytes()].concat()
            }
            Control::Ready(region) => [&[READY][..], &region.to_bytes()].concat(),
            Control::Go => vec![GO],
            Control::Wrong(text) => {
                let shortened: String = text.chars().take(40).collect();
                let text = if text.len() < super::CONTROL {
                    text
                } else {
                    &shortened
                };
                [&[WRONG], text.as_bytes()].concat()
            }
        }
    }

    /// # Errors
    /// If the message is none of these.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Control> {
        Self::parse(bytes).ok_or_else(|| format!("not a control message: {bytes:02x?}").into())
    }

    fn parse(bytes: &[u8]) -> Option<Control> {
        let (tag, rest) = bytes.split_first()?;
        match *tag {
            SETUP => {
                let (setup, region) = rest.split_first_chunk()?;
                Some(Control::Setup(Setup::from_bytes(setup)?, remote(region)?))
            }
            READY => Some(Control::Ready(remote(rest)?)),
            GO if rest.is_empty() => Some(Control::Go),
            WRONG => Some(Control::Wrong(String::from_utf8_lossy(rest).into_owned())),
            _ => None,
        }
    }
}

fn remote(bytes: &[u8]) -> Option<RemoteRegion> {
    let bytes: &[u8; REGION] = bytes.try_into().ok()?;
    Some(RemoteRegion::from_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_control_message_comes_out_as_it_went_in() {
        let region = RemoteRegion::new(0x1234_5678_9abc, 4096, 77);
        let setup = Setup {
            op: Op::Read,
            size: 4096,
            iterations: 1000,
            corrupt_at: Some(3),
        };
        let never = Setup {
            op: Op::Write,
            corrupt_at: None,
            ..setup
        };
        let messages = [
            Control::Setup(setup, region),
            Control::Setup(never, region),
            Control::Ready(region),
            Control::Go,
            Control::Wrong("byte 3".into()),
        ];
        for message in messages {
            assert_eq!(Control::from_bytes(&message.to_bytes()).unwrap(), message);
        }
    }

    #[test]
    fn what_is_no_control_message_is_an_error() {
        for bytes in [
            &[][..],
            &[0],
            &[SETUP],
            &[SETUP; 42][..41],
            &[READY, 1],
            &[GO, 0],
            &[9],
        ] {
            assert!(Control::from_bytes(bytes).is_err(), "{bytes:?}");
        }
    }
}
