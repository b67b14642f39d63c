//! The life of an endpoint as a table: what happens, in which state, leads to which actions.
//!
//! It is pure, so that every pair of state and input is tested. The worker feeds it and carries the
//! actions out in the order in which [`Actions`] lists them.
//!
//! ```text
//!  Opening ──► Open ──close──► Draining ──sends done──► Flushing ──all done──► Closed
//!     │          │                 │                       ▲                     ▲
//!     └──────────┴── bad news ─────┴───────────────────────┘                     │
//!     └──────────┴────────────────────────── abort ────────┴─────────────────────┘
//! ```
//!
//! The queue pair goes to its error state when *we* say so, never earlier and never later: after
//! bad news at once, since the connection manager does not do it and nothing would be flushed (the
//! kernel leaves the survivor's queue pair ready to send); on a close only once the sends are done.

use std::ops::BitOr;

/// Where an endpoint is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// The connection is being made. Receives can be posted.
    Opening,
    /// Everything can be posted.
    Open,
    /// Closed by the user; sends in flight are waited for, nothing new is accepted.
    Draining,
    /// The queue pair is in its error state; what is in flight is being flushed.
    Flushing,
    /// Nothing is in flight, the queue pair is destroyed.
    Closed,
}

/// What can happen to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// The connection manager reports the connection as established.
    Established,
    /// A message has arrived, which proves that the connection is established.
    FirstReceive,
    /// The user closes.
    Close,
    /// The endpoint is dropped.
    Abort,
    /// The connection is lost: a connection manager event, a failed or flushed operation, an error
    /// of the queue pair, the completion queue or the device.
    BadNews,
    /// The current state has lasted as long as it may.
    Deadline,
    /// No send is in flight.
    SendsDone,
    /// Nothing is in flight.
    AllDone,
}

/// What the worker has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Actions(u8);

impl Actions {
    pub(crate) const NONE: Actions = Actions(0);
    /// Move the queue pair to its error state, so that everything is flushed.
    pub(crate) const TO_ERROR: Actions = Actions(1);
    /// Tell the peer, or answer it (`rdma_disconnect`).
    pub(crate) const DISCONNECT: Actions = Actions(1 << 1);
    /// Destroy the queue pair, poll the completion queue dry, end what is left, let the id go.
    pub(crate) const DESTROY: Actions = Actions(1 << 2);
    /// Wake who waits for the new state.
    pub(crate) const WAKE: Actions = Actions(1 << 3);

    pub(crate) fn contains(self, other: Actions) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Actions {
    type Output = Actions;

    fn bitor(self, other: Actions) -> Actions {
        Actions(self.0 | other.0)
    }
}

impl State {
    /// The next state, and what to do on the way there.
    #[must_use]
    pub(crate) fn on(self, input: Input) -> (State, Actions) {
        use Input as I;
        use State as S;
        match (self, input) {
            (S::Opening, I::Established | I::FirstReceive) => (S::Open, Actions::WAKE),

            (S::Open, I::Close) => (S::Draining, Actions::WAKE),
            (S::Opening, I::Close) => (S::Flushing, BREAK),
            (S::Draining, I::SendsDone) => (S::Flushing, BREAK),

            (S::Opening | S::Open | S::Draining, I::BadNews) => (S::Flushing, BREAK),
            (S::Opening | S::Draining, I::Deadline) => (S::Flushing, BREAK),

            (S::Flushing, I::AllDone | I::Deadline | I::Abort) => (S::Closed, END),
            (S::Opening | S::Open | S::Draining, I::Abort) => (S::Closed, BREAK | END),

            (S::Open, I::Deadline | I::Established | I::FirstReceive)
            | (S::Opening | S::Open, I::SendsDone)
            | (S::Opening | S::Open | S::Draining, I::AllDone)
            | (S::Draining, I::Close | I::Established | I::FirstReceive)
            | (
                S::Flushing,
                I::Established | I::FirstReceive | I::Close | I::BadNews | I::SendsDone,
            )
            | (S::Closed, _) => (self, Actions::NONE),
        }
    }

    /// Whether sends, writes, reads and atomics are accepted.
    #[inline]
    pub(crate) fn takes_sends(self) -> bool {
        self == State::Open
    }

    /// Whether receives are accepted. Never once the queue pair is in its error state: soft-RoCE
    /// takes such a receive and never completes it.
    #[inline]
    pub(crate) fn takes_receives(self) -> bool {
        matches!(self, State::Opening | State::Open | State::Draining)
    }

    /// Whether the connection has ended, or is ending by itself.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, State::Flushing | State::Closed)
    }
}

const BREAK: Actions = Actions(Actions::TO_ERROR.0 | Actions::DISCONNECT.0 | Actions::WAKE.0);
const END: Actions = Actions(Actions::DESTROY.0 | Actions::WAKE.0);

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 5] = [
        State::Opening,
        State::Open,
        State::Draining,
        State::Flushing,
        State::Closed,
    ];
    const INPUTS: [Input; 8] = [
        Input::Established,
        Input::FirstReceive,
        Input::Close,
        Input::Abort,
        Input::BadNews,
        Input::Deadline,
        Input::SendsDone,
        Input::AllDone,
    ];

    fn all() -> impl Iterator<Item = (State, Input, State, Actions)> {
        STATES.into_iter().flat_map(|state| {
            INPUTS.into_iter().map(move |input| {
                let (next, actions) = state.on(input);
                (state, input, next, actions)
            })
        })
    }

    #[test]
    fn states_are_only_passed_forward() {
        for (state, input, next, _) in all() {
            assert!(
                next as u8 >= state as u8,
                "{state:?} went back to {next:?} on {input:?}"
            );
        }
    }

    #[test]
    fn the_queue_pair_goes_to_error_exactly_when_flushing_begins() {
        for (state, input, next, actions) in all() {
            let begins = !state.is_over() && next.is_over();
            assert_eq!(
                actions.contains(Actions::TO_ERROR),
                begins,
                "{state:?} {input:?}"
            );
            assert_eq!(
                actions.contains(Actions::DISCONNECT),
                begins,
                "{state:?} {input:?}"
            );
        }
    }

    #[test]
    fn the_queue_pair_is_destroyed_exactly_when_it_closes() {
        for (state, input, next, actions) in all() {
            let closes = state != State::Closed && next == State::Closed;
            assert_eq!(
                actions.contains(Actions::DESTROY),
                closes,
                "{state:?} {input:?}"
            );
        }
    }

    #[test]
    fn every_change_wakes_those_who_wait_and_nothing_else_does() {
        for (state, input, next, actions) in all() {
            assert_eq!(
                actions.contains(Actions::WAKE),
                state != next,
                "{state:?} {input:?}"
            );
        }
    }

    #[test]
    fn bad_news_ends_every_living_state() {
        for state in [State::Opening, State::Open, State::Draining] {
            assert_eq!(state.on(Input::BadNews).0, State::Flushing);
        }
    }

    #[test]
    fn an_abort_closes_from_everywhere_at_once() {
        for state in STATES {
            assert_eq!(state.on(Input::Abort).0, State::Closed);
        }
    }

    #[test]
    fn a_close_waits_for_the_sends_and_then_for_the_flush() {
        let (state, actions) = State::Open.on(Input::Close);
        assert_eq!((state, actions), (State::Draining, Actions::WAKE));
        let (state, _) = state.on(Input::SendsDone);
        assert_eq!(state, State::Flushing);
        assert_eq!(state.on(Input::AllDone).0, State::Closed);
    }

    #[test]
    fn every_state_but_open_and_closed_is_bounded_by_its_deadline() {
        for state in [State::Opening, State::Draining, State::Flushing] {
            assert_ne!(state.on(Input::Deadline).0, state);
        }
        assert_eq!(State::Open.on(Input::Deadline).0, State::Open);
    }

    #[test]
    fn the_first_receive_opens_as_the_event_would() {
        let opened = State::Opening.on(Input::Established);
        assert_eq!(State::Opening.on(Input::FirstReceive), opened);
    }

    #[test]
    fn no_receive_is_taken_once_the_queue_pair_is_in_error() {
        assert!(!State::Flushing.takes_receives());
        assert!(!State::Closed.takes_receives());
        assert!(!State::Draining.takes_sends());
    }
}
