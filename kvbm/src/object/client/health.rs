//! Health of a store: whether it responds, and the reason as text for its operator if it does not.

use crate::folder::FolderLost;
use object_store::Error;

/// Whether a store can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreHealth {
    /// The manifests in the store are still being read.
    Starting,
    /// The store responds.
    Ready,
    /// The store does not respond, or responds with a temporary error. It is polled again.
    Unavailable(String),
    /// The store denies access, or the bucket does not exist. It is polled again, but an operator must act.
    Refused(String),
}

/// Characters of a server's error message that are kept for a log line.
const MAX_MESSAGE_CHARS: usize = 400;

/// The beginning of the text for a client of S3 without credentials.
pub(in crate::object) const NO_ROLE: &str = "no AWS_ACCESS_KEY_ID is set, and this machine has no role";

/// Where a machine of EC2 is asked for its role. Azure and Google use the address with other paths.
const EC2_METADATA: &str = "//169.254.169.254/latest/";

/// The error of a request as text for an operator, in one line.
pub(in crate::object) fn reason(error: &Error) -> String {
    match StoreHealth::from(error) {
        StoreHealth::Unavailable(why) | StoreHealth::Refused(why) => why,
        StoreHealth::Starting | StoreHealth::Ready => error.to_string(),
    }
}

impl From<&Error> for StoreHealth {
    fn from(error: &Error) -> Self {
        // Its text says what to do, and needs no name of a store before it.
        if let Error::Generic { source, .. } = error
            && source.is::<FolderLost>()
        {
            return Self::Unavailable(source.to_string());
        }
        let whole = single_line(error);
        let cause = single_line(root_cause(error));
        let shortened = |text: &str| text.chars().take(MAX_MESSAGE_CHARS).collect::<String>();
        let mut message = shortened(&whole);
        // Only the root cause of a failed connection says why it failed: a closed port, a certificate.
        if !whole.contains(&cause) {
            message = format!("{message}: {}", shortened(&cause));
        }
        if cause.contains("certificate") {
            message.push_str("; if a private authority signed it, set SSL_CERT_FILE to the file of that authority");
        }
        // A failed listing has its status only in the text.
        let status = || message.split_once("status code: ")?.1.get(..3)?.parse().ok();
        let status: u16 = match error {
            Error::NotFound { .. } => 404,
            Error::PermissionDenied { .. } => 403,
            Error::Unauthenticated { .. } => 401,
            _ => status().unwrap_or(0),
        };
        match status {
            status if asked_for_role(error) => {
                let why = format!("{NO_ROLE}: {message}");
                if matches!(status, 401 | 403 | 404) { Self::Refused(why) } else { Self::Unavailable(why) }
            }
            // Listing an empty prefix is no error, so it is the bucket that does not exist.
            404 => Self::Refused(format!("there is no such bucket or container: {message}")),
            403 => Self::Refused(format!("access is denied: {message}")),
            401 => Self::Refused(format!("the credentials are not accepted: {message}")),
            _ => Self::Unavailable(message),
        }
    }
}

/// Whether it was the request for the role of the machine that failed. Only a client of S3 without a key sends it.
fn asked_for_role(error: &Error) -> bool {
    let mut next: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = next {
        if error.to_string().contains(EC2_METADATA) {
            return true;
        }
        next = error.source();
    }
    false
}

fn root_cause(error: &Error) -> &dyn std::error::Error {
    let mut deepest: &dyn std::error::Error = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}

fn single_line(text: &(impl ToString + ?Sized)) -> String {
    text.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_need_an_operator_are_refusals() {
        let source = || "<Error>\n  <Code>X</Code> ".repeat(100).into();
        let path = String::from("kv/manifests");
        let store = "S3";
        let refused = [
            Error::NotFound { path: path.clone(), source: source() },
            Error::PermissionDenied { path: path.clone(), source: source() },
            Error::Unauthenticated { path, source: source() },
        ];
        for error in &refused {
            assert!(matches!(StoreHealth::from(error), StoreHealth::Refused(why) if why.chars().count() < 500));
        }
        for (message, refused) in
            [("status code: 403 Forbidden", true), ("status code: 503 Slow", false), ("what?", false)]
        {
            let error = Error::Generic { store, source: message.into() };
            assert_eq!(matches!(StoreHealth::from(&error), StoreHealth::Refused(_)), refused, "{message}");
        }
    }

    #[test]
    fn a_machine_without_credentials_for_aws_is_named_first() {
        for answer in ["", ": status code: 403 Forbidden"] {
            let source = format!("Error performing PUT http://169.254.169.254/latest/api/token in 1 s{answer}").into();
            let health = StoreHealth::from(&Error::Generic { store: "S3", source });
            assert_eq!(matches!(health, StoreHealth::Refused(_)), !answer.is_empty(), "{health:?}");
            let (StoreHealth::Unavailable(why) | StoreHealth::Refused(why)) = &health else { panic!("{health:?}") };
            assert!(why.starts_with("no AWS_ACCESS_KEY_ID is set, and this machine has no role: Generic S3"), "{why}");
        }
    }

    #[test]
    fn message_has_the_root_cause_and_advice_on_certificates() {
        #[derive(Debug, thiserror::Error)]
        #[error("error sending request")]
        struct Sending(#[source] std::io::Error);
        let message = |cause: &str| {
            let source = Box::new(Sending(std::io::Error::other(cause.to_owned())));
            let StoreHealth::Unavailable(why) = StoreHealth::from(&Error::Generic { store: "S3", source }) else {
                panic!("refused")
            };
            why
        };
        assert!(message("connection refused").ends_with("error sending request: connection refused"));
        assert!(message("invalid peer certificate: UnknownIssuer").contains("SSL_CERT_FILE"));
        assert!(!message("connection refused").contains("SSL_CERT_FILE"));
    }
}
