//! A scrape of `/metrics`, and the difference of two scrapes.

use std::collections::BTreeMap;

/// The samples of one scrape, by series name with labels as written.
#[derive(Clone, Debug, Default)]
pub struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    /// Parses the Prometheus text format. Lines without a sample are skipped.
    pub fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let pairs = samples.filter_map(|line| line.rsplit_once(' '));
        Self(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
    }

    /// The sum of a metric over all series with these labels; 0 without such a series.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let matches = |present: &[(&str, &str)]| labels.iter().all(|label| present.contains(label));
        self.series(name).filter(|(present, _)| matches(present)).map(|(_, value)| value).sum()
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

    /// The increase of a counter since an earlier scrape.
    pub fn increase_since(&self, earlier: &Self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.sum(name, labels) - earlier.sum(name, labels)
    }

    /// Labels and value of every series of a metric. Label values must not contain commas; Blockyard's do not.
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
    fn sum_adds_the_series_with_the_labels() {
        let scrape = Scrape::parse(TEXT);
        assert!((scrape.sum("blocks", &[]) - 7.0).abs() < f64::EPSILON);
        assert!((scrape.sum("blocks", &[("tier", "g3")]) - 4.0).abs() < f64::EPSILON);
        assert!((scrape.sum("plain", &[]) - 2.5).abs() < f64::EPSILON);
        assert!(scrape.sum("absent", &[]).abs() < f64::EPSILON);
    }

    #[test]
    fn by_sums_the_series_of_each_label_value() {
        let by = Scrape::parse(TEXT).by("blocks", "tier");
        assert_eq!(by.into_iter().collect::<Vec<_>>(), [("g2".to_owned(), 3.0), ("g3".to_owned(), 4.0)]);
    }
}
