//! The scenarios of `verbs/` on the fake fabric.

mod verbs;

use fake_verbs::Fabric;
use verbs::{Bed, scenarios};

fn on_fake(scenario: impl FnOnce(&Bed)) {
    let _fabric = Fabric::new(); // dropped last: panics if a rule was broken or something is left
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
