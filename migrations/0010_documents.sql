-- Documents: what the corpus holds. Every change that a reader could notice is recorded in the transaction that makes it.

-- One sequence for all documents: a version is never used twice, also when a document is deleted and made anew.
CREATE SEQUENCE posthouse.document_versions;

CREATE TABLE posthouse.documents (
    id text PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9_-]+$' AND octet_length(id) <= 511),
    kind text NOT NULL DEFAULT 'page',
    title text NOT NULL DEFAULT '',
    body text NOT NULL DEFAULT '',
    tags text[] NOT NULL DEFAULT '{}',
    lang text NOT NULL DEFAULT '',
    visible boolean NOT NULL DEFAULT true,
    source text,
    content_sha256 text,
    version bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX documents_version ON posthouse.documents (version);

-- Whatever a writer sets, the version moves exactly when a watched column does.
CREATE FUNCTION posthouse.version_document() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND (NEW.kind, NEW.title, NEW.body, NEW.tags, NEW.lang, NEW.visible)
        IS NOT DISTINCT FROM (OLD.kind, OLD.title, OLD.body, OLD.tags, OLD.lang, OLD.visible)
    THEN
        NEW.version := OLD.version;
        RETURN NEW;
    END IF;
    NEW.version := nextval('posthouse.document_versions');
    IF TG_OP = 'UPDATE' AND NEW.updated_at = OLD.updated_at THEN
        NEW.updated_at := clock_timestamp();
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER documents_version
BEFORE INSERT OR UPDATE ON posthouse.documents
FOR EACH ROW EXECUTE FUNCTION posthouse.version_document();

CREATE FUNCTION posthouse.record_document() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    document posthouse.documents := CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    change text := CASE TG_OP WHEN 'INSERT' THEN 'created' WHEN 'UPDATE' THEN 'updated' ELSE 'deleted' END;
BEGIN
    PERFORM posthouse.record_event(
        'document.' || change, document.id, jsonb_build_object('id', document.id, 'version', document.version)
    );
    RETURN NULL;
END
$$;

CREATE TRIGGER documents_written
AFTER INSERT OR DELETE ON posthouse.documents
FOR EACH ROW EXECUTE FUNCTION posthouse.record_document();

CREATE TRIGGER documents_changed
AFTER UPDATE ON posthouse.documents
FOR EACH ROW WHEN (NEW.version <> OLD.version)
EXECUTE FUNCTION posthouse.record_document();

-- What the index is known to hold of each subject. Without a row: nothing. A version of 0 says "deleted from the index".
CREATE TABLE posthouse.index_state (
    subject text PRIMARY KEY,
    lease_token uuid,
    lease_until timestamptz,
    posted_version bigint,
    task_uid bigint,
    waits integer NOT NULL DEFAULT 0,
    indexed_version bigint,
    rejected text,
    CHECK ((lease_token IS NULL) = (lease_until IS NULL)),
    CHECK (task_uid IS NULL OR posted_version IS NOT NULL)
);

CREATE INDEX index_state_lease ON posthouse.index_state (lease_token) WHERE lease_token IS NOT NULL;
CREATE INDEX index_state_task ON posthouse.index_state (task_uid) WHERE task_uid IS NOT NULL;

-- The full-text index that is used where no Meilisearch is: searches read the live generation only.
CREATE TABLE posthouse.search_entries (
    generation integer NOT NULL,
    id text NOT NULL,
    kind text NOT NULL,
    lang text NOT NULL,
    tags text[] NOT NULL,
    updated_at timestamptz NOT NULL,
    version bigint NOT NULL,
    tsv tsvector NOT NULL,
    PRIMARY KEY (generation, id)
);

CREATE INDEX search_entries_tsv ON posthouse.search_entries USING gin (tsv);

CREATE TABLE posthouse.search_state (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    live_generation integer NOT NULL,
    building_generation integer
);

INSERT INTO posthouse.search_state (live_generation)
VALUES (1);
