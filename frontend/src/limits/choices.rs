//! Limits of concurrent choices per connection and per tenant.
//!
//! A request has as many choices as prompts times `n`. The limits keep a connection that does not read its choices, and
//! a tenant with many connections, from filling the engines' queues. Not here: fair shares of tenants (the router), and
//! choices that are not read (the engine).

use crate::error::Error;
use crate::settings::Settings;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// `Retry-After` above a limit. The client knows when its own choices end; a second keeps it from retrying in a loop.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Counts running choices per tenant, and holds the limits.
#[derive(Clone)]
pub(crate) struct ChoiceLimits {
    per_connection: usize,
    per_tenant: usize,
    tenants: Arc<Mutex<HashMap<Arc<str>, usize>>>,
}

/// The number of running choices of one connection. Each request has this among its extensions.
#[derive(Clone, Default)]
pub(crate) struct ConnectionChoices(Arc<Mutex<usize>>);

/// Counts the choices of a request until it is dropped.
#[must_use = "the choices are counted until this is dropped"]
pub(crate) struct RunningChoices {
    count: usize,
    connection: Option<ConnectionChoices>,
    tenant: Option<(Arc<str>, ChoiceLimits)>,
}

impl ChoiceLimits {
    pub(crate) fn new(settings: &Settings) -> Self {
        let Settings { max_choices_per_connection, max_choices_per_tenant, .. } = *settings;
        Self { per_connection: max_choices_per_connection, per_tenant: max_choices_per_tenant, tenants: Arc::default() }
    }

    /// Counts `count` choices of a request, or rejects it. Requests without a tenant are counted by connection only.
    pub(crate) fn start(
        &self,
        count: usize,
        connection: Option<&ConnectionChoices>,
        tenant: &Arc<str>,
    ) -> Result<RunningChoices, Error> {
        let mut choices = RunningChoices { count, connection: None, tenant: None };
        if let Some(connection) = connection {
            let mut running = connection.0.lock();
            *running = add(*running, count, self.per_connection, "connection")?;
            choices.connection = Some(connection.clone());
        }
        if !tenant.is_empty() {
            let mut tenants = self.tenants.lock();
            let running = tenants.get(tenant).copied().unwrap_or_default();
            // On an error, dropping `choices` uncounts the connection.
            tenants.insert(tenant.clone(), add(running, count, self.per_tenant, "tenant")?);
            choices.tenant = Some((tenant.clone(), self.clone()));
        }
        Ok(choices)
    }
}

/// `running` plus `count`, if that is at most `max`. `client` is the word for the client in messages.
fn add(running: usize, count: usize, max: usize, client: &str) -> Result<usize, Error> {
    if count > max {
        let message =
            format!("Invalid 'n': the request has {count} choices, but a {client} may have {max} at the same time.");
        return Err(Error::invalid("n", "integer_above_max_value", message));
    }
    if running + count > max {
        return Err(Error::Overloaded(RETRY_AFTER));
    }
    Ok(running + count)
}

impl Drop for RunningChoices {
    fn drop(&mut self) {
        if let Some(connection) = &self.connection {
            *connection.0.lock() -= self.count;
        }
        if let Some((tenant, limits)) = &self.tenant {
            let mut tenants = limits.tenants.lock();
            if let Some(running) = tenants.get_mut(tenant) {
                *running -= self.count;
                if *running == 0 {
                    tenants.remove(tenant);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> ChoiceLimits {
        ChoiceLimits::new(&Settings {
            max_choices_per_connection: 10,
            max_choices_per_tenant: 15,
            ..Settings::default()
        })
    }

    fn overloaded(result: &Result<RunningChoices, Error>) -> bool {
        matches!(result, Err(Error::Overloaded(_)))
    }

    #[test]
    fn a_connection_gets_no_more_choices_than_its_limit() {
        let choices = limits();
        let one = ConnectionChoices::default();
        let other = ConnectionChoices::default();
        let no_tenant = "".into();
        let running = choices.start(6, Some(&one), &no_tenant).unwrap();
        assert!(overloaded(&choices.start(5, Some(&one), &no_tenant)));
        let _fits = choices.start(4, Some(&one), &no_tenant).unwrap();
        let _another = choices.start(10, Some(&other), &no_tenant).unwrap();
        drop(running);
        assert!(choices.start(6, Some(&one), &no_tenant).is_ok());
        assert!(matches!(choices.start(11, Some(&one), &no_tenant), Err(Error::Invalid { .. })), "never possible");
    }

    #[test]
    fn a_tenant_gets_no_more_choices_than_its_limit() {
        let choices = limits();
        let one = ConnectionChoices::default();
        let other = ConnectionChoices::default();
        let ann = "ann".into();
        let bob = "bob".into();
        let running = choices.start(10, Some(&one), &ann).unwrap();
        assert!(overloaded(&choices.start(6, Some(&other), &ann)));
        assert_eq!(*other.0.lock(), 0, "a rejected request is not counted on its connection");
        let _bobs = choices.start(10, Some(&other), &bob).unwrap();
        drop(running);
        assert_eq!(choices.tenants.lock().len(), 1, "a tenant without choices is not kept");
    }
}
