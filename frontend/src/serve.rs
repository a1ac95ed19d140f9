//! Accepting connections, and ending well: stop accepting, let streams finish, cut what is left at the deadline.

use axum::extract::Extension;
use axum::serve::ListenerExt;
use axum::{Router, serve as accept};
use std::future::{Future, IntoFuture};
use std::io;
use std::pin::pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// After streams were cut, how long their last bytes may take to reach a slow client.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// Told when the drain deadline has passed: requests that still run end with an error that says so.
#[derive(Clone, Default)]
pub(crate) struct Cut(CancellationToken);

impl Cut {
    /// Resolves when what still runs must end.
    pub(crate) fn passed(self) -> impl Future<Output = ()> + Send + 'static {
        self.0.cancelled_owned()
    }
}

/// Serves until `shutdown`, then accepts nothing more and lets requests finish for at most `drain`. What still runs then is
/// told so and ended; the engine sees its streams dropped.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: CancellationToken,
    drain: Duration,
) -> io::Result<()> {
    let cut = Cut::default();
    let router = router.layer(Extension(cut.clone()));
    // Small chunks must leave at once, not wait for the acknowledgement of the one before.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let serving = accept(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned()).into_future();
    let mut serving = pin!(serving);
    tokio::select! {
        biased;
        ended = &mut serving => return ended,
        () = async { shutdown.cancelled().await; tokio::time::sleep(drain).await } => {}
    }
    tracing::warn!(drain_s = drain.as_secs_f64(), "requests still run at the drain deadline, ending them");
    cut.0.cancel();
    tokio::time::timeout(LAST_BYTES, serving).await.unwrap_or(Ok(()))
}
