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
        let (whole, cause) = (line(error), line(root(error)));
        let short = |words: &str| words.chars().take(WORDS).collect::<String>();
        let mut said = short(&whole);
        // A client says that it could not send, and only the deepest cause why: a port that is closed, a certificate.
        if !whole.contains(&cause) {
            said = format!("{said}: {}", short(&cause));
        }
        if cause.contains("certificate") {
            said.push_str("; where an authority of one's own signed it, SSL_CERT_FILE names that authority's file");
        }
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

/// What lies at the bottom of an error.
fn root(error: &Error) -> &dyn std::error::Error {
    let mut deepest: &dyn std::error::Error = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}

fn line(words: &(impl ToString + ?Sized)) -> String {
    words.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
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

    #[test]
    fn the_deepest_cause_is_said_and_a_certificate_comes_with_what_to_do() {
        #[derive(Debug, thiserror::Error)]
        #[error("error sending request")]
        struct Sending(#[source] std::io::Error);
        let said = |cause: &str| {
            let source = Box::new(Sending(std::io::Error::other(cause.to_owned())));
            let Standing::Away(why) = Standing::from(&Error::Generic { store: "S3", source }) else {
                panic!("refused")
            };
            why
        };
        assert!(said("connection refused").ends_with("error sending request: connection refused"), "{}", said("x"));
        assert!(said("invalid peer certificate: UnknownIssuer").contains("SSL_CERT_FILE"));
        assert!(!said("connection refused").contains("SSL_CERT_FILE"));
    }
}
