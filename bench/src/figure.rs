//! A measured figure and its goal.

use serde_json::{Value, json};

/// The goal of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Goal {
    /// The value or more.
    AtLeast(f64),
    /// The value or less.
    AtMost(f64),
    /// Less than the value.
    Below(f64),
    /// No goal: the figure is printed for comparison.
    None,
}

/// One figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    what: String,
    measured: Result<f64, &'static str>,
    unit: &'static str,
    goal: Goal,
}

impl Figure {
    /// A value in a unit.
    pub fn of(what: String, value: f64, unit: &'static str, goal: Goal) -> Self {
        Self { what, measured: Ok(value), unit, goal }
    }

    /// A value divided by its reference of the same run. It has no unit.
    pub fn ratio(what: String, value: f64, goal: Goal) -> Self {
        Self::of(what, value, "", goal)
    }

    /// A figure that could not be measured, with the reason.
    pub fn missing(what: String, why: &'static str, goal: Goal) -> Self {
        Self { what, measured: Err(why), unit: "", goal }
    }

    /// Whether the goal is met; `None` without a goal or without a measured value.
    pub fn met(&self) -> Option<bool> {
        let value = self.measured.ok()?;
        match self.goal {
            Goal::AtLeast(least) => Some(value >= least),
            Goal::AtMost(most) => Some(value <= most),
            Goal::Below(bound) => Some(value < bound),
            Goal::None => None,
        }
    }

    /// The cells of a table row: what, measured, goal, met.
    pub fn row(&self) -> [String; 4] {
        let with_unit = |number: String| format!("{number} {}", self.unit).trim_end().to_owned();
        let measured = self.measured.map_or_else(str::to_owned, |value| with_unit(short(value)));
        let goal = match self.goal {
            Goal::AtLeast(least) => with_unit(format!("≥ {least}")),
            Goal::AtMost(most) => with_unit(format!("≤ {most}")),
            Goal::Below(bound) => with_unit(format!("< {bound}")),
            Goal::None => String::new(),
        };
        let met = match (self.goal, self.met()) {
            (Goal::None, _) => "",
            (_, Some(true)) => "yes",
            (_, Some(false)) => "NO",
            (_, None) => "?",
        };
        [self.what.clone(), measured, goal, met.to_owned()]
    }

    /// The figure as JSON.
    pub fn as_json(&self) -> Value {
        let goal = match self.goal {
            Goal::AtLeast(least) => json!({ "at_least": least }),
            Goal::AtMost(most) => json!({ "at_most": most }),
            Goal::Below(bound) => json!({ "below": bound }),
            Goal::None => Value::Null,
        };
        let missing = self.measured.err();
        json!({
            "figure": self.what, "measured": self.measured.ok(), "missing": missing, "unit": self.unit,
            "goal": goal, "met": self.met(),
        })
    }
}

/// A number with three significant digits.
fn short(value: f64) -> String {
    let digits = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_met_missed_or_unknown() {
        let met = |value, goal| Figure::ratio(String::new(), value, goal).met();
        assert_eq!(met(0.9, Goal::AtLeast(0.9)), Some(true));
        assert_eq!(met(0.89, Goal::AtLeast(0.9)), Some(false));
        assert_eq!(met(1.05, Goal::AtMost(1.05)), Some(true));
        assert_eq!(met(50.0, Goal::Below(50.0)), Some(false));
        assert_eq!(met(1.0, Goal::None), None);
        let missing = Figure::missing("G3".into(), "no fio", Goal::AtLeast(0.9));
        assert_eq!(missing.row(), ["G3", "no fio", "≥ 0.9", "?"].map(String::from));
        assert_eq!((missing.as_json()["measured"].clone(), missing.met()), (Value::Null, None));
    }

    #[test]
    fn a_row_has_units() {
        let row = Figure::of("p99".into(), 41.26, "µs", Goal::Below(50.0)).row();
        assert_eq!(row, ["p99", "41.3 µs", "< 50 µs", "yes"].map(String::from));
    }
}
