//! An S3 server in this process, behind a socket, with real signatures: `s3s` over a folder. It counts its requests.
//!
//! Some stores support conditional writes, and some silently ignore the conditions; [`Conditions`] selects one
//! behaviour.

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, body::Incoming};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, CompleteMultipartUploadInput, CompleteMultipartUploadOutput,
    CreateMultipartUploadInput, CreateMultipartUploadOutput, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput,
    DeleteObjectsOutput, GetObjectInput, GetObjectOutput, HeadObjectInput, HeadObjectOutput, ListObjectsV2Input,
    ListObjectsV2Output, PutObjectInput, PutObjectOutput, UploadPartInput, UploadPartOutput,
};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, S3, S3Request, S3Response, S3Result};
use s3s_fs::FileSystem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// The access key and the secret key.
pub(crate) const KEYS: (&str, &str) = ("blockyard", "a-key-of-the-tests");
/// The only bucket.
pub(crate) const BUCKET: &str = "kvbmtests";

/// How the server treats `If-None-Match` and `If-Match` on writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Conditions {
    Honoured,
    Ignored,
}

/// A server that stops when it is dropped.
pub(crate) struct S3Server {
    pub(crate) endpoint: String,
    requests: Arc<AtomicU64>,
    _stop: oneshot::Sender<()>,
    _folder: TempDir,
}

impl S3Server {
    /// Starts a server with an empty bucket on a thread of its own, independent of the test's clock and runtime.
    pub(crate) fn start(conditions: Conditions) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the server");
        std::fs::create_dir(folder.path().join(BUCKET)).expect("a bucket");
        let files = FileSystem::new(folder.path()).expect("a store of files");
        let mut builder = match conditions {
            Conditions::Honoured => S3ServiceBuilder::new(files),
            Conditions::Ignored => S3ServiceBuilder::new(WithoutConditions(files)),
        };
        builder.set_auth(SimpleAuth::from_single(KEYS.0, KEYS.1));
        let service = builder.build();
        let requests = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = oneshot::channel::<()>();
        let (listens, listening) = std::sync::mpsc::channel();
        let counted = requests.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
                let address = listener.local_addr().expect("an address");
                listens.send(format!("http://{address}")).expect("the starting thread waits");
                tokio::select! {
                    () = accept(listener, service, counted) => {}
                    _ = stopped => {}
                }
            });
        });
        let endpoint = listening.recv().expect("the server listens");
        Self { endpoint, requests, _stop: stop, _folder: folder }
    }

    /// Requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, service: S3Service, requests: Arc<AtomicU64>) {
    while let Ok((socket, _)) = listener.accept().await {
        // Without it, small responses wait 40 ms for an acknowledgement.
        let _ = socket.set_nodelay(true);
        let service = service.clone();
        let requests = requests.clone();
        let counting = service_fn(move |request: Request<Incoming>| {
            requests.fetch_add(1, Ordering::Relaxed);
            let service = service.clone();
            async move { service.call(request.map(Body::from)).await }
        });
        tokio::spawn(async move { http1::Builder::new().serve_connection(TokioIo::new(socket), counting).await });
    }
}

/// A store of files without conditional writes.
struct WithoutConditions(FileSystem);

/// Delegates requests unchanged.
macro_rules! delegate {
    ($($call:ident: $input:ty => $output:ty),+ $(,)?) => {
        #[async_trait::async_trait]
        impl S3 for WithoutConditions {
            $(async fn $call(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                self.0.$call(request).await
            })+

            async fn put_object(
                &self,
                mut request: S3Request<PutObjectInput>,
            ) -> S3Result<S3Response<PutObjectOutput>> {
                (request.input.if_none_match, request.input.if_match) = (None, None);
                self.0.put_object(request).await
            }
        }
    };
}
delegate! {
    get_object: GetObjectInput => GetObjectOutput,
    head_object: HeadObjectInput => HeadObjectOutput,
    list_objects_v2: ListObjectsV2Input => ListObjectsV2Output,
    delete_object: DeleteObjectInput => DeleteObjectOutput,
    delete_objects: DeleteObjectsInput => DeleteObjectsOutput,
    create_multipart_upload: CreateMultipartUploadInput => CreateMultipartUploadOutput,
    upload_part: UploadPartInput => UploadPartOutput,
    complete_multipart_upload: CompleteMultipartUploadInput => CompleteMultipartUploadOutput,
    abort_multipart_upload: AbortMultipartUploadInput => AbortMultipartUploadOutput,
}
