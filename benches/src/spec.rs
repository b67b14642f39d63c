//! One measurement, as both sides of it and the C floor take it on their command lines.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// One operation at a time; sends and writes with immediate are answered, so that a sample is a round trip.
    Latency,
    /// As many operations in flight as the depth allows.
    Rate,
    /// One connection after the other, each phase timed.
    Connect,
    /// The peer is killed with `depth` operations in flight: the time until each has its outcome.
    Truth,
}

/// The operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// SEND, received by the peer.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA WRITE with immediate data, which takes a receive of the peer.
    WriteImm,
    /// RDMA READ.
    Read,
    /// Atomic compare-and-swap.
    Cas,
    /// Atomic fetch-and-add.
    Faa,
}

impl Op {
    /// All operations, in the order of the tables.
    pub const ALL: [Op; 6] = [
        Op::Send,
        Op::Write,
        Op::WriteImm,
        Op::Read,
        Op::Cas,
        Op::Faa,
    ];

    /// Whether the peer must have posted a receive for it.
    pub fn consumes_receive(self) -> bool {
        matches!(self, Op::Send | Op::WriteImm)
    }

    /// Whether it works on one word of eight bytes.
    pub fn is_atomic(self) -> bool {
        matches!(self, Op::Cas | Op::Faa)
    }
}

/// How a completion is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    /// Sleep until the completion channel has an event.
    Event,
    /// As `Event`, and be woken by the connection manager too. `rdma-msg` always does; the floor only if asked.
    Watch,
    /// Poll for a while, then sleep.
    Hybrid,
    /// Poll.
    Spin,
}

/// One measurement. The options are word for word those of the C floor, but for `--cm`.
#[derive(Args, Clone, Debug)]
pub struct Spec {
    /// The address of this side's device.
    #[arg(long)]
    pub bind: IpAddr,
    /// The server's address; needed by a client.
    #[arg(long)]
    pub peer: Option<IpAddr>,
    /// The server's port.
    #[arg(long, default_value_t = 18515)]
    pub port: u16,
    /// What is measured.
    #[arg(long, value_enum, default_value_t = Mode::Latency)]
    pub mode: Mode,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Send)]
    pub op: Op,
    /// How completions are waited for.
    #[arg(long, value_enum, default_value_t = Wait::Event)]
    pub wait: Wait,
    /// Bytes of payload.
    #[arg(long, default_value_t = 64)]
    pub size: u32,
    /// Operations that are measured.
    #[arg(long, default_value_t = 1000)]
    pub iters: u32,
    /// Operations before those.
    #[arg(long, default_value_t = 100)]
    pub warmup: u32,
    /// Most operations in flight.
    #[arg(long, default_value_t = 1)]
    pub depth: u32,
    /// Work requests per doorbell.
    #[arg(long, default_value_t = 1)]
    pub batch: u32,
    /// Every so many'th operation asks for a completion.
    #[arg(long, default_value_t = 1)]
    pub signal: u32,
    /// Payloads up to this many bytes are sent inline.
    #[arg(long, default_value_t = 0)]
    pub inline: u32,
    /// Microseconds of polling before a hybrid wait sleeps: a few round trips of an emulated machine. About
    /// one, and a few instructions more or less would decide whether it sleeps each time or never.
    #[arg(long, default_value_t = 200)]
    pub spin_us: u32,
    /// Do not take a time stamp around each operation.
    #[arg(long)]
    pub no_samples: bool,
    /// Connect with rdma-cm and rdma-core-rs, without rdma-msg.
    #[arg(long)]
    pub cm: bool,
    /// Seconds after which the process is killed.
    #[arg(long, default_value_t = 60)]
    pub limit: u32,
}

impl Spec {
    /// Receives that a side keeps posted: twice the depth, so that a sender holding credits for all of them never meets
    /// an empty queue.
    pub fn receive_depth(&self) -> u32 {
        if self.depth < 8 { 16 } else { 2 * self.depth }
    }

    /// Measured and warm-up operations together.
    pub fn end(&self) -> u64 {
        u64::from(self.warmup) + u64::from(self.iters)
    }

    /// Where this side listens or starts from.
    pub fn local(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.bind, port)
    }

    /// The first rule that the values break, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        let rules = [
            (
                self.iters > 0 && self.depth > 0 && self.batch > 0 && self.signal > 0,
                "counts are at least 1",
            ),
            (self.batch <= 64, "--batch is at most 64"),
            (self.batch <= self.depth, "--batch is at most --depth"),
            (self.signal <= self.depth, "--signal is at most --depth"),
            (
                !self.op.is_atomic() || self.size == 8,
                "an atomic has 8 bytes",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(rule),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_value(self, f)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_value(self, f)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_value(self, f)
    }
}

/// Writes the word that stands for the value on the command line.
fn write_value<V: ValueEnum>(value: &V, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match value.to_possible_value() {
        Some(word) => f.write_str(word.get_name()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_command_line_and_of_json() {
        assert_eq!(Op::WriteImm.to_string(), "write-imm");
        assert_eq!(
            serde_json::to_string(&Op::WriteImm).ok().as_deref(),
            Some("\"write-imm\"")
        );
    }
}
