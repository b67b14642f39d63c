//! The scenarios of `verbs/` on the fake fabric.

mod verbs;

use fake_verbs::{Config, ErrorFields, Fabric};
use verbs::{Bed, scenarios};

fn on_fake(scenario: impl FnOnce(&Bed)) {
    on(Fabric::new(), scenario);
}

fn on(_fabric: Fabric, scenario: impl FnOnce(&Bed)) {
    // The fabric is dropped last: panics if a rule was broken or something is left.
    scenario(&Bed::open(("fake0", "10.9.0.1"), ("fake1", "10.9.0.2")));
}

macro_rules! tests {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            on_fake(scenarios::$name);
        }
    )*};
}

for_all_scenarios!(tests);

#[test]
fn send_and_failure_are_read_where_the_provider_wrote() {
    let fabric = Fabric::with(Config {
        error_fields: ErrorFields::Unwritten,
        ..Config::default()
    });
    on(
        fabric,
        scenarios::send_and_failure_show_nothing_of_an_earlier_receive,
    );
}
