//! What has to be done before this process ends on a signal.
//!
//! Destructors do not run then. Who starts a process, makes a folder, or changes the system leaves here how to
//! undo it, and takes that back when it has been undone in the ordinary way.

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

/// Keeps an action registered; dropping it takes the action back.
#[must_use = "the action is taken back when this is dropped"]
pub(crate) struct AtInterrupt(u64);

/// Registers an action for the case that this process is told to end. The latest is done first.
///
/// # Errors
/// If signals cannot be caught; the action is not registered then.
pub(crate) fn at_interrupt(action: impl FnOnce() + Send + 'static) -> Result<AtInterrupt> {
    watch()?;
    let mut pending = pending();
    pending.last += 1;
    let id = pending.last;
    pending.actions.push((id, Box::new(action)));
    Ok(AtInterrupt(id))
}

impl Drop for AtInterrupt {
    fn drop(&mut self) {
        pending().actions.retain(|(id, _)| *id != self.0);
    }
}

type Action = Box<dyn FnOnce() + Send>;

/// The actions, and the number of the last one.
struct Pending {
    actions: Vec<(u64, Action)>,
    last: u64,
}

static PENDING: Mutex<Pending> = Mutex::new(Pending {
    actions: Vec::new(),
    last: 0,
});

fn pending() -> MutexGuard<'static, Pending> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that waits for signals, once.
fn watch() -> Result<()> {
    static STARTED: Once = Once::new();
    let mut result = Ok(());
    STARTED.call_once(|| {
        result = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM]).map(|mut signals| {
            thread::spawn(move || {
                if let Some(signal) = signals.forever().next() {
                    // The lock is kept until the end, so that nobody takes back what is being done.
                    let mut pending = pending();
                    while let Some((_, action)) = pending.actions.pop() {
                        action();
                    }
                    std::process::exit(128 + signal);
                }
            });
        });
    });
    Ok(result?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_registered_for_as_long_as_its_guard_lives() {
        let known = |guard: &AtInterrupt| pending().actions.iter().any(|(id, _)| *id == guard.0);
        let first = at_interrupt(|| {}).unwrap();
        let second = at_interrupt(|| {}).unwrap();
        assert!(known(&first) && known(&second));

        let id = first.0;
        drop(first);
        assert!(!pending().actions.iter().any(|(known, _)| *known == id));
        assert!(known(&second));
    }
}
