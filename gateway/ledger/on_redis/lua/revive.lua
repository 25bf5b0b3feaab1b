-- ids
local groups = 0
for i = 2, #ARGV do
  local r = load(ARGV[i])
  if r and r.state == 'failed' then
    move(r, 'revive', 'queued', nil, {attempt = 0})
    start_clock(r)
    groups = groups + 1
  end
end
return finish({'ok', groups})
