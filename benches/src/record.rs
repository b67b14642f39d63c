//! The lines of JSON that go from the guest to the report.

use serde::{Deserialize, Serialize};

/// Who runs: the floor that waits for news of the connection as well.
pub const FLOOR_WATCHING: &str = "floor watching the CM";
/// Who runs: connections with rdma-cm and rdma-core-rs.
pub const OURS_CM: &str = "ours without rdma-msg";

/// Whether this is one of our own programs, not a tool that we measure against.
pub fn is_own(who: &str) -> bool {
    ["ours", OURS_CM, "floor", FLOOR_WATCHING].contains(&who)
}

/// One line that the suite writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    /// What the figures were measured on.
    Bed(Bed),
    /// One run of one program.
    Run(Box<Run>),
    /// One exact count of two programs.
    Count(Count),
}

/// What the figures were measured on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bed {
    /// `uname -r`.
    pub kernel: String,
    /// Processors of the machine or guest.
    pub cpus: usize,
    /// Rounds, of which the first is dropped.
    pub rounds: u32,
}

/// One run of one program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The row of the table.
    pub case: String,
    /// The program: `ours`, `floor`, or the name of a tool.
    pub who: String,
    /// The round; round 0 is cold and not counted.
    pub round: u32,
    /// The figures; absent if the run failed.
    pub figures: Option<Figures>,
    /// Why there are no figures.
    pub error: Option<String>,
    /// Packets that were sent again during the run, both devices together.
    pub retries: u64,
    /// "Receiver not ready" answers during the run, both devices together.
    pub rnr: u64,
}

/// The figures of a run. A program fills in what it knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// Median of the operations, microseconds.
    pub p50_us: Option<f64>,
    /// The time that one operation in a hundred exceeds, microseconds.
    pub p99_us: Option<f64>,
    /// Mean of the operations, microseconds.
    pub mean_us: Option<f64>,
    /// Mean of the operations in the middle one of the stretches of 64, microseconds: without the odd timer tick.
    pub steady_us: Option<f64>,
    /// Operations a second.
    pub ops_per_s: Option<f64>,
    /// Payload a second, 10^6 bytes.
    pub mb_per_s: Option<f64>,
    /// Nanoseconds of all measured operations together.
    pub total_ns: Option<u64>,
    /// Calls of `ibv_post_send` in the measured part.
    pub doorbells: Option<u64>,
    /// Completions polled in the measured part, receives included.
    pub completions: Option<u64>,
    /// Times the completion queue was armed in the measured part.
    pub arms: Option<u64>,
    /// Times the program went to sleep in the measured part.
    pub wakeups: Option<u64>,
    /// Allocations in the measured part.
    pub allocations: Option<u64>,
    /// Whether what arrived is what was sent.
    pub verified: Option<bool>,
    /// Resolving address and route, microseconds.
    pub resolve_us: Option<f64>,
    /// Creating queues and memory, microseconds.
    pub create_us: Option<f64>,
    /// From the request to the established connection, microseconds.
    pub connect_us: Option<f64>,
    /// From asking to having ended it, microseconds.
    pub disconnect_us: Option<f64>,
    /// Destroying queues, memory and id, microseconds.
    pub destroy_us: Option<f64>,
    /// From the peer's death to the last outcome, milliseconds.
    pub truth_ms: Option<f64>,
    /// Operations that had succeeded by then.
    pub ok: Option<u64>,
    /// Operations that ended with an error.
    pub failed: Option<u64>,
}

/// One exact count: of `rdma-msg`, of the floor, and the one as a multiple of the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Count {
    /// The row: `instructions/send-64-event` and the like.
    pub name: String,
    /// Ours, per operation.
    pub ours: f64,
    /// The floor's, per operation.
    pub floor: f64,
    /// `ours / floor`; absent if the floor's is 0.
    pub ratio: Option<f64>,
}

impl Count {
    /// A count with its ratio.
    pub fn new(name: String, ours: f64, floor: f64) -> Count {
        let ratio = (floor != 0.0).then(|| ours / floor);
        Count {
            name,
            ours,
            floor,
            ratio,
        }
    }
}
