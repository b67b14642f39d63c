//! The kernel's log, watched for what must not be in it.

use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// Reads the log from where it was opened on.
pub(crate) struct KernelLog {
    records: File,
}

impl KernelLog {
    /// Begins with what the kernel says from now on.
    pub(crate) fn from_here() -> Result<KernelLog> {
        let mut records = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .context("cannot read the kernel's log")?;
        records.seek(SeekFrom::End(0))?;
        Ok(KernelLog { records })
    }

    /// The alarms among what the kernel has said since the last call.
    pub(crate) fn alarms(&mut self) -> Vec<String> {
        alarms(&self.news())
    }

    fn news(&mut self) -> Vec<String> {
        let mut messages = Vec::new();
        let mut record = [0; 8192];
        loop {
            match self.records.read(&mut record) {
                Ok(0) => return messages,
                Ok(length) => {
                    messages.extend(message(&String::from_utf8_lossy(&record[..length])));
                }
                // Records were overwritten before they were read: go on with the oldest.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return messages,
            }
        }
    }
}

/// The text of a record `priority,number,time,flags;text`.
fn message(record: &str) -> Option<String> {
    let (_, text) = record.split_once(';')?;
    Some(text.lines().next()?.to_owned())
}

/// Reports of a kernel that has found itself wrong, each with the lines that follow it. Ordinary errors are not
/// among them: drivers print those for what a test asks of them in error.
fn alarms(messages: &[String]) -> Vec<String> {
    let mut alarms: Vec<String> = Vec::new();
    let mut rest = messages;
    while let Some(at) = rest.iter().position(|message| is_alarm(message)) {
        let end = rest.len().min(at + CONTEXT);
        alarms.push(format!("the kernel said: {}", rest[at..end].join("\n")));
        rest = &rest[end..];
    }
    alarms
}

fn is_alarm(message: &str) -> bool {
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    let worker_hangs =
        message.contains("task kworker") && message.contains("blocked for more than");
    has(ALARMS) && !has(STARVATION) || worker_hangs
}

/// Not in the list: stalls, and tasks that are blocked, unless they are the kernel's own workers. A busy machine that
/// does not run the guest's processors produces them by itself, and a test that really hangs fails by its own time.
const ALARMS: &[&str] = &[
    "WARNING:",
    "BUG:",
    "kernel BUG at",
    "Oops:",
    "general protection fault",
    "UBSAN:",
    "KASAN:",
    "refcount_t:",
    "list_add corruption",
    "list_del corruption",
    "Kernel panic",
    "trace ]---",
];

/// What the kernel says of a processor that did not get on, in the words of an alarm.
const STARVATION: &[&str] = &["BUG: soft lockup", "BUG: workqueue lockup"];

/// So many lines of an alarm are shown.
const CONTEXT: usize = 30;

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_warning_is_an_alarm_with_its_context() {
        let log =
            lines("eth0: link up\nWARNING: CPU: 0 PID: 1 at rxe_pool.c:5\nCall Trace:\n rxe_x");
        let alarms = alarms(&log);
        assert_eq!(alarms.len(), 1);
        assert!(
            alarms[0].ends_with("rxe_pool.c:5\nCall Trace:\n rxe_x"),
            "{}",
            alarms[0]
        );
    }

    #[test]
    fn what_drivers_say_of_bad_requests_is_none() {
        assert!(alarms(&lines("rdma_rxe: qp_chk_attr: bad\nv0: link becomes ready")).is_empty());
    }

    #[test]
    fn a_processor_that_the_machine_did_not_run_is_no_alarm() {
        let log = "watchdog: BUG: soft lockup - CPU#0 stuck for 22s! [swapper/0:1]
BUG: workqueue lockup - pool cpus=1 node=0 flags=0x0 nice=0 stuck for 35s!
rcu: INFO: rcu_sched self-detected stall on CPU
rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 1-... }
INFO: task pingpong:79 blocked for more than 120 seconds.
watchdog: Watchdog detected hard LOCKUP on cpu 1
clocksource: Long readout interval, skipping watchdog check";
        assert_eq!(alarms(&lines(log)), [""; 0]);
    }

    #[test]
    fn what_a_kernel_finds_wrong_in_itself_is_an_alarm() {
        for line in [
            "BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "INFO: task kworker/0:1:9 blocked for more than 120 seconds.",
            "BUG: scheduling while atomic: rxe/7/0x00000002",
            "BUG: KASAN: use-after-free in rxe_completer+0x1/0x2 [rdma_rxe]",
            "WARNING: CPU: 1 PID: 7 at lib/refcount.c:28 refcount_warn_saturate+0xba/0x110",
            "refcount_t: underflow; use-after-free.",
            "Kernel panic - not syncing: Fatal exception in interrupt",
        ] {
            assert_eq!(alarms(&lines(line)).len(), 1, "{line}");
        }
    }

    #[test]
    fn the_text_of_a_record_is_its_first_line_behind_the_semicolon() {
        let record = "4,339,5140900,-;a; b\n SUBSYSTEM=pci\n";
        assert_eq!(message(record).as_deref(), Some("a; b"));
    }
}
