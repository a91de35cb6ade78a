#!/bin/sh
# Makes the two roles of docs/operating.md and the database. The image of Postgres runs it once, on an empty data folder.
set -eu
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\getenv owner_password SALTERN_OWNER_PASSWORD
\getenv app_password SALTERN_APP_PASSWORD
CREATE ROLE saltern_owner LOGIN PASSWORD :'owner_password';
CREATE ROLE saltern_app LOGIN PASSWORD :'app_password';
CREATE DATABASE saltern OWNER saltern_owner ENCODING 'UTF8' TEMPLATE template0;
REVOKE ALL ON DATABASE saltern FROM PUBLIC;
GRANT CONNECT ON DATABASE saltern TO saltern_app;
SQL
