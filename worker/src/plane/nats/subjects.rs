//! Names of subjects. The source of an event is in its subject and nowhere else, so the permissions of an account
//! decide which process may publish for which source.
//!
//! ```text
//!   <prefix>.events.<topic>.<kind>.<id>     events of a source; kind: worker, store, router
//!   <prefix>.logs.<kind>.<id>               asks which epochs of a source's log are offered, and at which URLs
//!   <prefix>.logs.<kind>.<id>.<epoch>       asks one of these logs
//!   <prefix>.texts.<hash>                   asks for a tokenizer and a chat template
//!   <prefix>.inbox.>                        answers
//!   $KV.<bucket>.instances.<id>             the record of a worker
//! ```

use crate::plane::{RouterId, Source, StoreId, Topic, WorkerId};
use kvbm::Epoch;

/// Makes the subjects of one prefix and bucket.
#[derive(Clone, Debug)]
pub(super) struct Subjects {
    prefix: String,
    bucket: String,
}

impl Subjects {
    pub(super) fn new(prefix: &str, bucket: &str) -> Self {
        Self { prefix: prefix.to_owned(), bucket: bucket.to_owned() }
    }

    pub(super) fn inbox(&self) -> String {
        format!("{}.inbox", self.prefix)
    }

    /// Whether answers may be published to a subject: it is in an inbox of the deployment. A process publishes them
    /// with its own permissions, so any other subject would let the reader write where only this process may.
    pub(super) fn is_in_inbox(&self, subject: &str) -> bool {
        let rest = subject.strip_prefix(&self.inbox()).and_then(|rest| rest.strip_prefix('.'));
        rest.is_some_and(|rest| !rest.is_empty())
    }

    /// All events of a topic.
    pub(super) fn topic(&self, topic: Topic) -> String {
        format!("{}.events.{}.*.*", self.prefix, name(topic))
    }

    pub(super) fn event(&self, topic: Topic, source: Source) -> String {
        format!("{}.events.{}.{}", self.prefix, name(topic), tokens(source))
    }

    pub(super) fn log(&self, source: Source) -> String {
        format!("{}.logs.{}", self.prefix, tokens(source))
    }

    pub(super) fn log_of_epoch(&self, source: Source, epoch: Epoch) -> String {
        format!("{}.{}", self.log(source), epoch.0)
    }

    pub(super) fn texts(&self, hash: &str) -> String {
        format!("{}.texts.{hash}", self.prefix)
    }

    pub(super) fn instance(&self, id: WorkerId) -> String {
        format!("$KV.{}.instances.{}", self.bucket, id.0)
    }

    /// Whether a text, such as an error of the server, names a subject that a registration needs: a key of the bucket,
    /// or the one that asks for its value.
    pub(super) fn names_record(&self, text: &str) -> bool {
        text.contains(&format!("$KV.{}.", self.bucket)) || text.contains(&format!(".MSG.GET.KV_{}", self.bucket))
    }

    /// The records of all workers.
    pub(super) fn instances(&self) -> String {
        format!("$KV.{}.instances.*", self.bucket)
    }
}

fn name(topic: Topic) -> &'static str {
    match topic {
        Topic::Cache => "cache",
        Topic::Reservations => "reservations",
        Topic::RoleRequests => "role_requests",
    }
}

fn tokens(source: Source) -> String {
    match source {
        Source::Worker(id) => format!("worker.{}", id.0),
        Source::Store(id) => format!("store.{}", id.0),
        Source::Router(id) => format!("router.{}", id.0),
    }
}

/// The source that the last two tokens of an event's subject name.
pub(super) fn source(subject: &str) -> Option<Source> {
    let mut tokens = subject.rsplit('.');
    let id = id(tokens.next()?)?;
    match tokens.next()? {
        "worker" => Some(Source::Worker(WorkerId(id))),
        "store" => Some(Source::Store(StoreId(id))),
        "router" => Some(Source::Router(RouterId(id))),
        _ => None,
    }
}

/// The worker that the last token of a record's subject names.
pub(super) fn worker(subject: &str) -> Option<WorkerId> {
    id(subject.rsplit('.').next()?).map(WorkerId)
}

/// The id that a token is. Another way to write the number, such as `07` or `+7`, is no id: the permissions of an
/// account go by subjects, and two records would be those of one worker.
fn id(token: &str) -> Option<u64> {
    token.parse().ok().filter(|id: &u64| id.to_string() == token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_subject_of_an_event_names_its_source() {
        let subjects = Subjects::new("a.b", "c");
        for id in [0, 7, u64::MAX] {
            for of in [Source::Worker(WorkerId(id)), Source::Store(StoreId(id)), Source::Router(RouterId(id))] {
                assert_eq!(source(&subjects.event(Topic::Cache, of)), Some(of));
            }
        }
        assert_eq!(subjects.event(Topic::Cache, Source::Worker(WorkerId(7))), "a.b.events.cache.worker.7");
        assert_eq!(worker(&subjects.instance(WorkerId(7))), Some(WorkerId(7)));
        assert_eq!((source("a.events.cache.other.1"), source("a.events.cache.worker.x")), (None, None));
        for alias in ["07", "+7", "7 ", "-7", "", "٧", "18446744073709551616"] {
            assert_eq!(worker(&format!("$KV.c.instances.{alias}")), None, "{alias}");
            assert_eq!(source(&format!("a.b.events.cache.worker.{alias}")), None, "{alias}");
        }
    }

    #[test]
    fn a_denied_subject_of_a_record_is_known() {
        let subjects = Subjects::new("a.b", "c");
        for denied in [r#"to "$KV.c.instances.7""#, r#"to "$JS.API.STREAM.MSG.GET.KV_c""#] {
            assert!(subjects.names_record(denied), "{denied}");
        }
        for other in [r#"to "a.b.events.cache.worker.7""#, r#"to "$JS.API.STREAM.CREATE.KV_c""#] {
            assert!(!subjects.names_record(other), "{other}");
        }
    }

    #[test]
    fn answers_go_to_inboxes_of_the_deployment_only() {
        let subjects = Subjects::new("a.b", "c");
        assert!(subjects.is_in_inbox("a.b.inbox.XYZ") && subjects.is_in_inbox("a.b.inbox.XYZ.1"));
        let events = subjects.event(Topic::Cache, Source::Worker(WorkerId(7)));
        for other in [
            subjects.instance(WorkerId(7)).as_str(),
            events.as_str(),
            "a.b.inbox",
            "a.b.inbox.",
            "a.b.inboxes.1",
            "a.inbox.1",
            "_INBOX.1",
            "x.a.b.inbox.1",
            "A.B.INBOX.1",
            "",
        ] {
            assert!(!subjects.is_in_inbox(other), "{other:?}");
        }
    }
}
