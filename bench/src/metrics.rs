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
        let carries = |carried: &[(&str, &str)]| labels.iter().all(|label| carried.contains(label));
        self.series(name).filter(|(carried, _)| carries(carried)).map(|(_, value)| value).sum()
    }

    /// A metric's sum for each value of a label.
    pub fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for (labels, value) in self.series(name) {
            if let Some((_, of)) = labels.iter().find(|(name, _)| *name == label) {
                *sums.entry((*of).to_owned()).or_default() += value;
            }
        }
        sums
    }

    /// How much a counter rose since an earlier reading.
    pub fn since(&self, earlier: &Self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.sum(name, labels) - earlier.sum(name, labels)
    }

    /// Every series of a metric: its labels, its value. (No label of ours has a comma in it.)
    fn series(&self, name: &str) -> impl Iterator<Item = (Vec<(&str, &str)>, f64)> {
        self.0.iter().filter_map(move |(series, value)| {
            let labels = match series.strip_prefix(name)? {
                "" => "",
                rest => rest.strip_prefix('{')?.strip_suffix('}')?,
            };
            let pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
            Some((pairs.map(|(label, value)| (label, value.trim_matches('"'))).collect(), *value))
        })
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

    #[test]
    fn sums_are_told_apart_by_a_label() {
        let by = Reading::parse(TEXT).by("blocks", "tier");
        assert_eq!(by.into_iter().collect::<Vec<_>>(), [("g2".to_owned(), 3.0), ("g3".to_owned(), 4.0)]);
    }
}
