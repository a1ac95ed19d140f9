//! How a store stands: whether it answers, and if not, in words for whoever runs it.

use object_store::Error;

/// Whether the store serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// What rests there is not known yet.
    Learning,
    /// It answers.
    Ready,
    /// It does not answer, or answers that it cannot now. It is asked again.
    Away(String),
    /// It answers that we may not, or that there is no such place. It is asked again, but somebody must change something.
    Refused(String),
}

/// As much of a server's own words as a line of a log bears.
const WORDS: usize = 400;

impl From<&Error> for Standing {
    fn from(error: &Error) -> Self {
        let said: String = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let said: String = said.chars().take(WORDS).collect();
        match error {
            // Listing an empty prefix finds nothing, which is no error: what is not there is the bucket.
            Error::NotFound { .. } => Self::Refused(format!("there is no such bucket or container: {said}")),
            Error::PermissionDenied { .. } => Self::Refused(format!("access is denied: {said}")),
            Error::Unauthenticated { .. } => Self::Refused(format!("the credentials are not accepted: {said}")),
            _ => Self::Away(said),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_somebody_must_change_is_a_refusal() {
        let source = || "<Error>\n  <Code>X</Code> ".repeat(100).into();
        let (path, store) = (String::from("kv/manifests"), "S3");
        let refused = [
            Error::NotFound { path: path.clone(), source: source() },
            Error::PermissionDenied { path: path.clone(), source: source() },
            Error::Unauthenticated { path, source: source() },
        ];
        for error in &refused {
            assert!(matches!(Standing::from(error), Standing::Refused(why) if why.chars().count() < 500));
        }
        assert!(matches!(Standing::from(&Error::Generic { store, source: source() }), Standing::Away(_)));
    }
}
