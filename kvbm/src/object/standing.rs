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
        // A failed listing carries its status in words only.
        let status = || said.split_once("status code: ")?.1.get(..3)?.parse().ok();
        let status: u16 = match error {
            Error::NotFound { .. } => 404,
            Error::PermissionDenied { .. } => 403,
            Error::Unauthenticated { .. } => 401,
            _ => status().unwrap_or(0),
        };
        match status {
            // Listing an empty prefix finds nothing, which is no error: what is not there is the bucket.
            404 => Self::Refused(format!("there is no such bucket or container: {said}")),
            403 => Self::Refused(format!("access is denied: {said}")),
            401 => Self::Refused(format!("the credentials are not accepted: {said}")),
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
        for (said, refused) in
            [("status code: 403 Forbidden", true), ("status code: 503 Slow", false), ("what?", false)]
        {
            let error = Error::Generic { store, source: said.into() };
            assert_eq!(matches!(Standing::from(&error), Standing::Refused(_)), refused, "{said}");
        }
    }
}
