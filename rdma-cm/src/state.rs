//! The life of one connection as a table: which state, which input, what to do.
//!
//! Nothing here touches an id, a queue pair or a clock. [`Resolving`](crate::Resolving),
//! [`Connecting`](crate::Connecting) and [`Connection`](crate::Connection) feed events and expired
//! deadlines in and do what comes out. That keeps the answer to "and if *this* event comes *now*?"
//! in one place, where all of its 150-odd cases are tested.

use crate::event::{EventStatus, EventType};

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// The peer's address is being resolved.
    ResolvingAddr,
    /// The path to the peer is being resolved.
    ResolvingRoute,
    /// Active side: the request is out.
    Connecting,
    /// Passive side: the answer is out, and the peer's confirmation is not here yet.
    Accepting,
    /// Both sides know that the connection is up.
    Established,
    /// It is over, or has failed. The id is good for nothing but being dropped.
    Ended,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    AddrResolved,
    /// `again`: it may work at the next attempt.
    AddrError {
        again: bool,
    },
    RouteResolved,
    /// `again`: it may work at the next attempt.
    RouteError {
        again: bool,
    },
    ConnectRequest,
    ConnectResponse,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    Multicast,
    AddrChange,
    TimewaitExit,
    Unknown,
    /// The deadline passed.
    Deadline,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    /// Ask for the address again.
    ResolveAddr,
    /// Ask for the path (again).
    ResolveRoute,
    /// The step is done: hand out its result.
    Done,
    /// Move the queue pair to RTR and RTS and confirm to the peer; then the step is done.
    Establish,
    /// Tell the user.
    Report,
    /// The step failed: tell the user why.
    Fail,
    /// It says nothing at this time.
    Ignore,
}

impl State {
    /// The next state, and what to do.
    pub(crate) fn next(self, input: Input) -> (Self, Action) {
        match self {
            Self::ResolvingAddr => self.resolving_addr(input),
            Self::ResolvingRoute => self.resolving_route(input),
            Self::Connecting => self.connecting(input),
            Self::Accepting => self.accepting(input),
            Self::Established => self.established(input),
            Self::Ended => self.ended(input),
        }
    }

    fn resolving_addr(self, input: Input) -> (Self, Action) {
        match input {
            Input::AddrResolved => (Self::ResolvingRoute, Action::ResolveRoute),
            Input::AddrError { again: true } => (self, Action::ResolveAddr),
            _ => self.before_the_request(input),
        }
    }

    fn resolving_route(self, input: Input) -> (Self, Action) {
        match input {
            // Done leaves the state to whoever takes the id over.
            Input::RouteResolved => (self, Action::Done),
            Input::RouteError { again: true } => (self, Action::ResolveRoute),
            _ => self.before_the_request(input),
        }
    }

    /// Bad news ends the attempt even if it is not the news that was waited for.
    fn before_the_request(self, input: Input) -> (Self, Action) {
        match input {
            Input::AddrError { .. }
            | Input::RouteError { .. }
            | Input::ConnectError
            | Input::Unreachable
            | Input::Rejected
            | Input::Disconnected
            | Input::DeviceRemoval
            | Input::Deadline => (Self::Ended, Action::Fail),
            _ => (self, Action::Ignore),
        }
    }

    fn connecting(self, input: Input) -> (Self, Action) {
        match input {
            Input::ConnectResponse => (Self::Established, Action::Establish),
            // iWARP: the kernel moves the queue pair, and reports only the result.
            Input::Established => (Self::Established, Action::Done),
            Input::TimewaitExit => (Self::Ended, Action::Fail),
            _ => self.before_the_request(input),
        }
    }

    fn accepting(self, input: Input) -> (Self, Action) {
        match input {
            Input::Established => (Self::Established, Action::Report),
            _ => self.connected(input),
        }
    }

    fn established(self, input: Input) -> (Self, Action) {
        self.connected(input)
    }

    fn connected(self, input: Input) -> (Self, Action) {
        match input {
            Input::ConnectError
            | Input::Unreachable
            | Input::Rejected
            | Input::Disconnected
            | Input::DeviceRemoval
            | Input::TimewaitExit => (Self::Ended, Action::Report),
            Input::AddrChange | Input::Unknown => (self, Action::Report),
            _ => (self, Action::Ignore),
        }
    }

    /// The end is told once; what may still come is that the device goes, or that the kernel is
    /// done with the queue pair number.
    fn ended(self, input: Input) -> (Self, Action) {
        match input {
            Input::DeviceRemoval | Input::TimewaitExit | Input::Unknown => (self, Action::Report),
            _ => (self, Action::Ignore),
        }
    }
}

impl Input {
    /// The input that an event is.
    pub(crate) fn from_event(event: EventType, status: EventStatus) -> Self {
        match event {
            EventType::AddrResolved => Self::AddrResolved,
            EventType::AddrError => Self::AddrError {
                again: is_transient(status),
            },
            EventType::RouteResolved => Self::RouteResolved,
            EventType::RouteError => Self::RouteError {
                again: is_transient(status),
            },
            EventType::ConnectRequest => Self::ConnectRequest,
            EventType::ConnectResponse => Self::ConnectResponse,
            EventType::ConnectError => Self::ConnectError,
            EventType::Unreachable => Self::Unreachable,
            EventType::Rejected => Self::Rejected,
            EventType::Established => Self::Established,
            EventType::Disconnected => Self::Disconnected,
            EventType::DeviceRemoval => Self::DeviceRemoval,
            EventType::MulticastJoin | EventType::MulticastError => Self::Multicast,
            EventType::AddrChange => Self::AddrChange,
            EventType::TimewaitExit => Self::TimewaitExit,
            EventType::Unknown(_) => Self::Unknown,
        }
    }
}

/// Whether a failed look-up is worth another attempt while there is time: the kernel waited for an
/// answer that may have been lost. Everything else is known at once, and would fail at once again.
fn is_transient(status: EventStatus) -> bool {
    status.errno() == Some(libc::ETIMEDOUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 6] = [
        State::ResolvingAddr,
        State::ResolvingRoute,
        State::Connecting,
        State::Accepting,
        State::Established,
        State::Ended,
    ];

    const INPUTS: [Input; 19] = [
        Input::AddrResolved,
        Input::AddrError { again: true },
        Input::AddrError { again: false },
        Input::RouteResolved,
        Input::RouteError { again: true },
        Input::RouteError { again: false },
        Input::ConnectRequest,
        Input::ConnectResponse,
        Input::ConnectError,
        Input::Unreachable,
        Input::Rejected,
        Input::Established,
        Input::Disconnected,
        Input::DeviceRemoval,
        Input::Multicast,
        Input::AddrChange,
        Input::TimewaitExit,
        Input::Unknown,
        Input::Deadline,
    ];

    /// One row per input, one column per state in the order of `STATES`. The first letter is the
    /// next state (A resolving Address, R resolving Route, C Connecting, P accepting (Passive),
    /// E Established, X ended; a dot is the same state), the second the action (a resolve Address,
    /// r resolve Route, d Done, e Establish, t reporT, f Fail, a dot is ignore).
    #[rustfmt::skip]
    const TABLE: [[&str; 6]; 19] = [
        //                       A     R     C     P     E     X
        /* AddrResolved      */ ["Rr", "..", "..", "..", "..", ".."],
        /* AddrError again   */ [".a", "Xf", "Xf", "..", "..", ".."],
        /* AddrError         */ ["Xf", "Xf", "Xf", "..", "..", ".."],
        /* RouteResolved     */ ["..", ".d", "..", "..", "..", ".."],
        /* RouteError again  */ ["Xf", ".r", "Xf", "..", "..", ".."],
        /* RouteError        */ ["Xf", "Xf", "Xf", "..", "..", ".."],
        /* ConnectRequest    */ ["..", "..", "..", "..", "..", ".."],
        /* ConnectResponse   */ ["..", "..", "Ee", "..", "..", ".."],
        /* ConnectError      */ ["Xf", "Xf", "Xf", "Xt", "Xt", ".."],
        /* Unreachable       */ ["Xf", "Xf", "Xf", "Xt", "Xt", ".."],
        /* Rejected          */ ["Xf", "Xf", "Xf", "Xt", "Xt", ".."],
        /* Established       */ ["..", "..", "Ed", "Et", "..", ".."],
        /* Disconnected      */ ["Xf", "Xf", "Xf", "Xt", "Xt", ".."],
        /* DeviceRemoval     */ ["Xf", "Xf", "Xf", "Xt", "Xt", ".t"],
        /* Multicast         */ ["..", "..", "..", "..", "..", ".."],
        /* AddrChange        */ ["..", "..", "..", ".t", ".t", ".."],
        /* TimewaitExit      */ ["..", "..", "Xf", "Xt", "Xt", ".t"],
        /* Unknown           */ ["..", "..", "..", ".t", ".t", ".t"],
        /* Deadline          */ ["Xf", "Xf", "Xf", "..", "..", ".."],
    ];

    fn letters(from: State, (to, action): (State, Action)) -> String {
        let state = match to {
            same if same == from => '.',
            State::ResolvingAddr => 'A',
            State::ResolvingRoute => 'R',
            State::Connecting => 'C',
            State::Accepting => 'P',
            State::Established => 'E',
            State::Ended => 'X',
        };
        let action = match action {
            Action::ResolveAddr => 'a',
            Action::ResolveRoute => 'r',
            Action::Done => 'd',
            Action::Establish => 'e',
            Action::Report => 't',
            Action::Fail => 'f',
            Action::Ignore => '.',
        };
        format!("{state}{action}")
    }

    #[test]
    fn every_transition_is_the_one_in_the_table() {
        for (input, row) in INPUTS.iter().zip(TABLE) {
            let found = STATES.map(|state| letters(state, state.next(*input)));
            println!("{:28} {}", format!("{input:?}"), found.join(" "));
            assert_eq!(found, row, "{input:?}");
        }
    }

    #[test]
    fn the_inputs_of_the_table_are_all_there_are() {
        let from_events: std::collections::HashSet<Input> = (0..=16)
            .flat_map(|number| {
                let event = EventType::from_raw(number);
                [0, -libc::ETIMEDOUT, -libc::ENODEV]
                    .map(|status| Input::from_event(event, EventStatus::decode(event, status)))
            })
            .collect();
        let listed = INPUTS
            .iter()
            .copied()
            .filter(|input| *input != Input::Deadline)
            .collect();
        assert_eq!(from_events, listed);
    }

    /// A small generator (xorshift) with a fixed seed: the same orders on every run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }
    }

    /// What a user may rely on, whatever the order of events.
    #[test]
    fn any_order_of_events_establishes_once_ends_once_and_never_comes_back() {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let rounds = if cfg!(miri) { 100 } else { 100_000 };
        for round in 0..rounds {
            let start = STATES[random.below(STATES.len())];
            let (mut state, mut ends, mut ups) = (start, 0, 0);
            for _ in 0..12 {
                let input = INPUTS[random.below(INPUTS.len())];
                let (next, action) = state.next(input);
                let was_over = state == State::Ended;
                if was_over {
                    assert_eq!(
                        next,
                        State::Ended,
                        "round {round}: {input:?} revived the dead"
                    );
                    assert!(
                        matches!(action, Action::Report | Action::Ignore),
                        "round {round}"
                    );
                }
                ends += usize::from(!was_over && next == State::Ended);
                ups += usize::from(state != State::Established && next == State::Established);
                if !was_over && next == State::Ended {
                    assert!(
                        matches!(action, Action::Report | Action::Fail),
                        "round {round}: silent end"
                    );
                }
                state = next;
            }
            assert!(
                ends <= 1 && ups <= 1,
                "round {round}: {ends} ends, {ups} establishments"
            );
        }
    }

    #[test]
    fn rejected_after_established_is_the_end_and_is_told() {
        let end = (State::Ended, Action::Report);
        assert_eq!(State::Established.next(Input::Rejected), end);
        assert_eq!(State::Accepting.next(Input::Disconnected), end);
    }

    #[test]
    fn nothing_but_a_deadline_or_bad_news_ends_a_connect() {
        for input in INPUTS {
            let (next, action) = State::Connecting.next(input);
            assert_eq!(next == State::Ended, action == Action::Fail, "{input:?}");
        }
    }
}
