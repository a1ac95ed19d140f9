//! A reading of `/metrics`, and the difference of two.

use std::collections::BTreeMap;

/// Every sample of one scrape, by its name with labels as written.
#[derive(Clone, Debug, Default)]
pub struct Reading(BTreeMap<String, f64>);

impl Reading {
    /// Reads Prometheus' text format. Lines that are no samples are passed over.
    pub fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let pairs = samples.filter_map(|line| line.rsplit_once(' '));
        Self(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
    }

    /// The sum of a metric over all series that carry these labels; zero when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carried = |series: &str| {
            let rest = series.strip_prefix(name)?;
            let inside = if rest.is_empty() { "" } else { rest.strip_prefix('{')?.strip_suffix('}')? };
            let pairs: Vec<&str> = inside.split(',').collect();
            labels.iter().all(|(label, value)| pairs.contains(&format!("{label}=\"{value}\"").as_str())).then_some(())
        };
        self.0.iter().filter(|(series, _)| carried(series).is_some()).map(|(_, value)| value).sum()
    }

    /// How much a counter rose since an earlier reading.
    pub fn since(&self, earlier: &Self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.sum(name, labels) - earlier.sum(name, labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP blocks Blocks.\n# TYPE blocks counter\nblocks{tier=\"g2\",to=\"g1\"} 3\n\
                        blocks{tier=\"g3\",to=\"g1\"} 4\nblocks_total 100\nplain 2.5\n";

    #[test]
    fn a_sum_takes_the_series_with_the_labels() {
        let reading = Reading::parse(TEXT);
        assert!((reading.sum("blocks", &[]) - 7.0).abs() < f64::EPSILON);
        assert!((reading.sum("blocks", &[("tier", "g3")]) - 4.0).abs() < f64::EPSILON);
        assert!((reading.sum("plain", &[]) - 2.5).abs() < f64::EPSILON);
        assert!(reading.sum("absent", &[]).abs() < f64::EPSILON);
    }
}
